// Carries the channels of boxes between connections of clients on other machines and the sockets of their sandboxes.
#ifndef UNTAX_FERRY_H
#define UNTAX_FERRY_H

#include <stddef.h>
#include <stdint.h>

struct client;

// `control` is the agent's end of a SOCK_SEQPACKET pair; returns when the agent has closed it.
int ferry_main(int control);

// For tests and fuzzers: the same without a process of its own.
int ferry_begin(int control);
void ferry_turn(void);  // what is ready now
void ferry_end(void);
// One message of a client as it is once its record was opened.
struct client *ferry_client(uint32_t number);
void ferry_take(struct client *c, const uint8_t *message, size_t size);

#endif
