"""One engine over HTTP: who may ask, what each of them holds, and the dialects it is asked in. Needs `untax[server]`."""
