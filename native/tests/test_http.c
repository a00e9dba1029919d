// The head of a proxied request: where it goes, and what the origin gets to see.
#include "http.h"

#include <string.h>

#include "check.h"

static struct http_target to;
static struct wr origin;

static const char *understand(const char *head) {
    to = (struct http_target){0};
    wr_free(&origin);
    const char *fault = http_understand(head, strlen(head), &to, &origin);
    wr_u8(&origin, 0);
    return fault;
}
static const char *sent(void) { return (const char *)origin.data; }

int main(void) {
    CHECK(http_head_size("GET", 3) == 0);
    CHECK(http_head_size("A\r\n\r\nrest", 9) == 5);
    CHECK(http_head_size("A\n\nrest", 7) == 3);
    CHECK(http_head_size("A\r\n\r", 4) == 0);

    CHECK(!understand("CONNECT example.org:443 HTTP/1.1\r\nHost: other\r\n\r\n"));
    CHECK(to.tunnel && !strcmp(to.host, "example.org") && to.port == 443);
    CHECK(!understand("CONNECT [2001:db8::1]:8443 HTTP/1.0\r\n\r\n"));
    CHECK(!strcmp(to.host, "2001:db8::1") && to.port == 8443);
    CHECK(understand("CONNECT example.org HTTP/1.1\r\n\r\n"));
    CHECK(understand("CONNECT :443 HTTP/1.1\r\n\r\n"));
    CHECK(understand("CONNECT a:0 HTTP/1.1\r\n\r\n"));
    CHECK(understand("CONNECT a:65536 HTTP/1.1\r\n\r\n"));
    CHECK(understand("CONNECT user@a:80 HTTP/1.1\r\n\r\n"));
    CHECK(understand("CONNECT [::1:80 HTTP/1.1\r\n\r\n"));

    // The name that was asked about is the one the origin is told, and what concerns only the proxy stays here.
    CHECK(!understand("GET http://a.org:81/p?q HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: s\r\nConnection: X-Y, close\r\nX-Y: 1\r\nAccept: *\r\n\r\n"));
    CHECK(!to.tunnel && !strcmp(to.host, "a.org") && to.port == 81);
    CHECK(!strcmp(sent(), "GET /p?q HTTP/1.1\r\nHost: a.org:81\r\nAccept: *\r\nConnection: close\r\n\r\n"));
    CHECK(!understand("GET http://a.org HTTP/1.1\r\n\r\n"));
    CHECK(to.port == 80 && !strncmp(sent(), "GET / HTTP/1.1\r\n", 16));
    CHECK(!understand("GET http://a.org?x=1 HTTP/1.1\r\n\r\n"));
    CHECK(!strncmp(sent(), "GET /?x=1 HTTP/1.1\r\n", 20));
    // A body must not lose its framing, whatever Connection says.
    CHECK(!understand("POST http://a.org/ HTTP/1.1\r\nConnection: content-length\r\nContent-Length: 3\r\n\r\n"));
    CHECK(strstr(sent(), "Content-Length: 3\r\n"));

    CHECK(understand("GET / HTTP/1.1\r\n\r\n"));
    CHECK(understand("GET https://a.org/ HTTP/1.1\r\n\r\n"));
    CHECK(understand("GET http://u:p@a.org/ HTTP/1.1\r\n\r\n"));
    CHECK(understand("GET http://a.org/ HTTP/2\r\n\r\n"));
    CHECK(understand("GET http://a.org/ HTTP/1.1\r\n folded\r\n\r\n"));
    CHECK(understand("\r\n\r\n"));
    CHECK(understand("\x01\x02\x03\n\n"));

    struct wr out = {0};
    http_refusal(&out, 403, "no", 2);
    wr_u8(&out, 0);
    CHECK(!strncmp((char *)out.data, "HTTP/1.1 403 Forbidden\r\n", 24) && strstr((char *)out.data, "\r\n\r\nno\n"));
    wr_free(&out);
    wr_free(&origin);
    return check_report();
}
