#define _GNU_SOURCE
#include "http.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define HOST_MAX 253  // of a name in the DNS

struct text {
    const char *at;
    size_t size;
};

size_t http_head_size(const char *data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (data[i] != '\n') continue;
        if (i + 1 < size && data[i + 1] == '\n') return i + 2;
        if (i + 2 < size && data[i + 1] == '\r' && data[i + 2] == '\n') return i + 3;
    }
    return 0;
}

// Takes the next line off `rest`, without its end.
static struct text next_line(struct text *rest) {
    const char *end = memchr(rest->at, '\n', rest->size);
    size_t size = end ? (size_t)(end - rest->at) : rest->size;
    struct text line = {rest->at, size};
    size_t used = end ? size + 1 : size;
    rest->at += used;
    rest->size -= used;
    if (line.size && line.at[line.size - 1] == '\r') line.size--;
    return line;
}

static struct text next_word(struct text *line) {
    const char *space = memchr(line->at, ' ', line->size);
    size_t size = space ? (size_t)(space - line->at) : line->size;
    struct text word = {line->at, size};
    size_t used = space ? size + 1 : size;
    line->at += used;
    line->size -= used;
    return word;
}

static bool is(struct text t, const char *word) { return t.size == strlen(word) && !strncasecmp(t.at, word, t.size); }

// host, host:port, [v6] or [v6]:port
static const char *understand_authority(struct text a, uint16_t port, struct http_target *to) {
    struct text name = a;
    const char *rest;
    if (a.size && a.at[0] == '[') {
        const char *close = memchr(a.at, ']', a.size);
        if (!close) return "an address without its closing bracket";
        name = (struct text){a.at + 1, (size_t)(close - a.at - 1)};
        rest = close + 1;
    } else {
        const char *colon = memchr(a.at, ':', a.size);
        if (colon) name.size = (size_t)(colon - a.at);
        rest = a.at + name.size;
    }
    size_t left = (size_t)(a.at + a.size - rest);
    unsigned number = 0;
    if (left) {
        if (*rest != ':' || left < 2 || left > 6) return "a malformed port";
        for (size_t i = 1; i < left; i++) {
            if (rest[i] < '0' || rest[i] > '9') return "a malformed port";
            number = number * 10 + (unsigned)(rest[i] - '0');
        }
        if (!number || number > 65535) return "a malformed port";
        port = (uint16_t)number;
    }
    if (!port) return "no port to connect to";
    if (!name.size || name.size > HOST_MAX) return "no host to connect to";
    for (size_t i = 0; i < name.size; i++) {
        unsigned char c = (unsigned char)name.at[i];
        if (c <= ' ' || c >= 0x7f || strchr("@/\\?#[]<>\"'%", c)) return "a malformed host";
    }
    memcpy(to->host, name.at, name.size);
    to->host[name.size] = 0;
    to->port = port;
    return NULL;
}

// Belongs to the connection between client and proxy, not to the request. Transfer-Encoding stays: the body passes as it is.
static bool is_hop_by_hop(struct text name) {
    return is(name, "connection") || is(name, "keep-alive") || is(name, "te") || is(name, "trailer") || is(name, "upgrade") ||
           (name.size >= 6 && !strncasecmp(name.at, "proxy-", 6));
}

// Does a Connection header of this head name it?
static bool is_named_by_connection(struct text headers, struct text name) {
    while (headers.size) {
        struct text line = next_line(&headers);
        const char *colon = line.size ? memchr(line.at, ':', line.size) : NULL;
        if (!colon || !is((struct text){line.at, (size_t)(colon - line.at)}, "connection")) continue;
        const char *at = colon + 1, *end = line.at + line.size;
        while (at < end) {
            while (at < end && (*at == ' ' || *at == ',' || *at == '\t')) at++;
            const char *word = at;
            while (at < end && *at != ',' && *at != ' ' && *at != '\t') at++;
            if ((size_t)(at - word) == name.size && name.size && !strncasecmp(word, name.at, name.size)) return true;
        }
    }
    return false;
}

static void put(struct wr *out, const char *text) { wr_raw(out, text, strlen(text)); }

const char *http_understand(const char *head, size_t size, struct http_target *to, struct wr *origin) {
    struct text rest = {head, size};
    struct text line = next_line(&rest);
    struct text method = next_word(&line), target = next_word(&line), version = line;
    if (!method.size || !target.size || version.size != 8 || strncmp(version.at, "HTTP/1.", 7) != 0) return "not an HTTP/1 request";
    for (size_t i = 0; i < method.size; i++)
        if (method.at[i] < '!' || method.at[i] > '~') return "not an HTTP/1 request";
    to->tunnel = is(method, "CONNECT");
    if (to->tunnel) return understand_authority(target, 0, to);

    if (target.size < 8 || strncasecmp(target.at, "http://", 7) != 0) return "a proxy takes CONNECT, or a whole http:// address";
    struct text authority = {target.at + 7, target.size - 7};
    for (size_t i = 0; i < authority.size; i++)
        if (strchr("/?#", authority.at[i]) && authority.at[i]) {
            authority.size = i;
            break;
        }
    const char *fault = understand_authority(authority, 80, to);
    if (fault) return fault;
    struct text path = {authority.at + authority.size, target.size - 7 - authority.size};
    wr_raw(origin, method.at, method.size);
    put(origin, path.size && path.at[0] == '/' ? " " : " /");
    wr_raw(origin, path.at, path.size);
    put(origin, " HTTP/1.1\r\nHost: ");  // the one that was allowed, whatever the client's own header says
    wr_raw(origin, authority.at, authority.size);
    put(origin, "\r\n");
    struct text headers = rest;
    while (rest.size) {
        struct text h = next_line(&rest);
        if (!h.size) break;
        const char *colon = memchr(h.at, ':', h.size);
        if (!colon || h.at[0] == ' ' || h.at[0] == '\t') return "a malformed header";
        struct text name = {h.at, (size_t)(colon - h.at)};
        if (is(name, "host") || is_hop_by_hop(name)) continue;
        bool framing = is(name, "content-length") || is(name, "transfer-encoding");
        if (!framing && is_named_by_connection(headers, name)) continue;
        wr_raw(origin, h.at, h.size);
        put(origin, "\r\n");
    }
    put(origin, "Connection: close\r\n\r\n");
    return NULL;
}

void http_refusal(struct wr *out, unsigned status, const char *text, size_t size) {
    char head[256];
    const char *reason = status == 403 ? "Forbidden" : status == 502 ? "Bad Gateway" : status == 504 ? "Gateway Timeout" : status == 503 ? "Service Unavailable" : "Error";
    int n = snprintf(head, sizeof head, "HTTP/1.1 %u %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
                     status, reason, size + 1);
    wr_raw(out, head, (size_t)n);
    wr_raw(out, text, size);
    wr_raw(out, "\n", 1);
}
