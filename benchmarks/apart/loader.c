/* loader PORT FILE CONNECTIONS SECONDS RATE: sends the request in a file over connections that are kept, and prints a JSON object.
   RATE 0 is a closed loop on each connection; otherwise requests are due at random times, so many a second, and latency counts
   from then on. Python as a client would be what is measured. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 1 << 16, QUEUE = 4096, MOST = 4000000 };

typedef struct {
    int fd, busy, status;
    size_t sent, have;
    long need;
    double began;
    char buffer[ROOM];
} Connection;

static char *request;
static size_t length;
static int port, epoll;
static double *taken, due[QUEUE];
static long answers, refused, closed, first_due, last_due;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void dial(Connection *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (connect(c->fd, (struct sockaddr *)&to, sizeof to)) usleep(2000);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->busy = 0;
    struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
}

static void push(Connection *c) {
    ssize_t written;
    while (c->sent < length && (written = write(c->fd, request + c->sent, length - c->sent)) > 0) c->sent += written;
}

static void begin(Connection *c, double at) {
    c->sent = c->have = 0;
    c->need = -1;
    c->busy = 1;
    c->began = at;
    push(c);
}

static void next(Connection *c, double rate) {
    if (!rate) begin(c, now());
    else if (first_due < last_due) begin(c, due[first_due++ % QUEUE]);
}

/* Reads what is there. Of an answer that is longer than the buffer only the end of the head matters. */
static void pull(Connection *c, double rate) {
    for (;;) {
        size_t at = c->have < ROOM - 4096 ? c->have : 0;
        ssize_t got = read(c->fd, c->buffer + at, ROOM - 1 - at);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) {
            closed++;
            close(c->fd);
            dial(c);
            if (!rate) begin(c, now());
            return;
        }
        c->have += got;
        if (c->need < 0) {
            c->buffer[at + got] = 0;
            char *end = strstr(c->buffer, "\r\n\r\n"), *size = strcasestr(c->buffer, "content-length:");
            if (end) c->need = end - c->buffer + 4 + (size ? atol(size + 15) : 0), c->status = atoi(c->buffer + 9);
        }
        if (c->need >= 0 && (long)c->have >= c->need && c->busy) {
            c->busy = 0;
            if (c->status == 200 && answers < MOST) taken[answers++] = now() - c->began;
            if (c->status != 200) refused++, usleep(1000);
            next(c, rate);
        }
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a - *(const double *)b;
    return (x > 0) - (x < 0);
}

int main(int count, char **words) {
    if (count != 6) return 2;
    FILE *file = fopen(words[2], "rb");
    if (!file) return 2;
    fseek(file, 0, SEEK_END);
    length = ftell(file);
    rewind(file);
    request = malloc(length);
    if (fread(request, 1, length, file) != length) return 2;
    port = atoi(words[1]);
    int connections = atoi(words[3]);
    double rate = atof(words[5]), began, end, soon;
    taken = malloc(sizeof(double) * MOST);
    Connection *all = calloc(connections, sizeof(Connection));
    epoll = epoll_create1(0);
    srand48(getpid());
    for (int i = 0; i < connections; i++) dial(all + i);
    began = soon = now();
    end = began + atof(words[4]);
    for (int i = 0; !rate && i < connections; i++) begin(all + i, now());
    for (double at; (at = now()) < end;) {
        if (rate) {
            for (; soon <= at; soon -= log(1 - drand48()) / rate)
                if (last_due - first_due < QUEUE) due[last_due++ % QUEUE] = soon;
            for (int i = 0; i < connections && first_due < last_due; i++)
                if (!all[i].busy) next(all + i, rate);
        }
        double left = (rate && soon < end ? soon : end) - now();
        struct epoll_event events[64];
        int found = epoll_wait(epoll, events, 64, left < 5e-4 ? 0 : left > 0.02 ? 20 : (int)(left * 1000));
        for (int i = 0; i < found; i++) {
            Connection *c = events[i].data.ptr;
            if (c->busy) push(c);
            pull(c, rate);
        }
    }
    double seconds = now() - began;
    qsort(taken, answers, sizeof *taken, compare);
#define AT(part) (answers ? taken[(long)((answers - 1) * (part))] * 1e3 : 0)
    printf("{\"answers\": %ld, \"rate\": %.1f, \"p50\": %.3f, \"p99\": %.3f, \"worst\": %.3f, \"refused\": %ld, \"closed\": %ld}\n",
           answers, answers / seconds, AT(.5), AT(.99), AT(1), refused, closed);
    return 0;
}
