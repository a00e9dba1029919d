// The system-call filter of a sandbox: default deny, one verdict for every number.
#ifndef UNTAX_SECCOMP_H
#define UNTAX_SECCOMP_H

#include <linux/filter.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Numbers below this have a verdict in the table; from here on calls are answered ENOSYS, as an old kernel would.
#define SECCOMP_NUMBERS 600

enum verdict {
    V_ENOSYS = 0,   // unknown, or must look absent (clone3: glibc then falls back to clone)
    V_EPERM,
    V_ALLOW,
    V_CLONE,        // allowed without namespace flags
    V_SOCKET,       // unix, inet, inet6, route netlink
    V_IOCTL,        // all but those that type into a terminal
    V_PERSONALITY,  // the harmless values
    V_PRLIMIT,      // asking, and changing one's own: the worker and, where ids are shared, the agent are not the workload's to limit
};

enum verdict seccomp_verdict(unsigned number);
const char *seccomp_verdict_name(enum verdict v);
uint32_t seccomp_arch(void);
// Builds the filter; returns its length. `room` of 1024 is enough for any table.
size_t seccomp_build(struct sock_filter *out, size_t room);
// Builds it once, for this process and those it will fork.
void seccomp_prepare(void);
// Applies it to the calling process; no_new_privs must be set. 0, or -1 with errno.
int seccomp_apply(void);
// `cell seccomp-table`: number and verdict, a line each; or the name in place of the number, where the table has one.
int seccomp_table_main(bool by_name);

#endif
