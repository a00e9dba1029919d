// The cell as the first process of a virtual machine: `cell init`, started by the kernel from the initramfs.
#ifndef UNTAX_INIT_H
#define UNTAX_INIT_H

// Mounts, waits on the control port to be told who it is, then serves the channel port as the agent. The exit status is nobody's: a machine whose
// first process ends is over.
int init_main(void);

#endif
