"""One trajectory from lease to release: workloads as data, and the runner that carries them out."""
