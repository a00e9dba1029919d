// Processes by id: the list of them, signals, terminal sizes, and taking over a stream.
#ifndef UNTAX_ATTACH_H
#define UNTAX_ATTACH_H

#include "wire.h"

void signal_handle(const struct frame *f);
void resize_handle(const struct frame *f);
void processes_handle(const struct frame *f);
void attach_handle(const struct frame *f);

#endif
