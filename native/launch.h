// The launcher: a small long-lived process that makes and ends namespace sandboxes for one engine.
#ifndef UNTAX_LAUNCH_H
#define UNTAX_LAUNCH_H

// `cell launcher FD`: serves the engine on that socket (SOCK_SEQPACKET) until it closes, then ends every sandbox it made.
int launcher_main(int argc, char **argv);

#endif
