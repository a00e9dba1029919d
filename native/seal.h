// Records that cannot be read or changed on their way: ChaCha20-Poly1305 (RFC 8439), in constant time. No sockets.
#ifndef UNTAX_SEAL_H
#define UNTAX_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SEAL_KEY 32u
#define SEAL_TAG 16u

// One direction of a stream. The nonce is four zero bytes and the count, little endian, so a key serves one direction only.
struct seal {
    uint8_t key[SEAL_KEY];
    uint64_t count;
};

// Encrypts `size` bytes in place and gives the tag over them and `head`, which travels in the clear. False, with nothing touched, once the count is used up (UINT64_MAX).
bool seal_close(struct seal *s, const uint8_t *head, size_t head_size, uint8_t *data, size_t size, uint8_t tag[SEAL_TAG]);
// Decrypts in place; false, with the data left encrypted, when the tag does not fit. The count moves on only on success.
bool seal_open(struct seal *s, const uint8_t *head, size_t head_size, uint8_t *data, size_t size, const uint8_t tag[SEAL_TAG]);
void seal_wipe(struct seal *s);

#endif
