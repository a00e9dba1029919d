// Starts a helper program of the engine's with as little as it needs: `cell confined`.
#ifndef UNTAX_CONFINED_H
#define UNTAX_CONFINED_H

// --parent PID [--uid ID] [--group ID]… [--join CGROUP.PROCS]… [--as-root] -- PROGRAM ARGUMENT…: ends with the parent, never gains a right. Returns only on failure, which is said.
int confined_main(int argc, char **argv);

#endif
