/* Sustained read bandwidth: threads add up their share of a buffer that no cache holds.
 * Arguments: MiB, threads, repetitions.  One line for each repetition: GB/s, from the first thread's beginning to the
 * last one's end by their own clocks: whoever waits for them may not have a core to look at its own.
 * With 0 repetitions, one for each line of standard input. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { LANES = 16, LONGEST = 256 };

struct share {
    const uint64_t *first;
    size_t count;
    uint64_t sum;
    double began, ended;
};

static pthread_barrier_t gate;
static int going_on = 1;

static double seconds_now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void add_up(struct share *mine) {
    uint64_t sums[LANES] = {0}; /* independent chains: the compiler turns them into vector registers */
    for (size_t at = 0; at + LANES <= mine->count; at += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += mine->first[at + lane];
    for (int lane = 0; lane < LANES; lane++) mine->sum += sums[lane];
}

static void *run(void *given) {
    struct share *mine = given;
    for (;;) {
        pthread_barrier_wait(&gate);
        if (!going_on) return NULL;
        mine->began = seconds_now();
        add_up(mine);
        mine->ended = seconds_now();
        pthread_barrier_wait(&gate);
    }
}

static int wanted(int turn, int repetitions) {
    char line[64];
    return repetitions ? turn < repetitions : fgets(line, sizeof line, stdin) != NULL;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    size_t bytes = strtoull(words[1], NULL, 10) << 20;
    int threads = atoi(words[2]);
    int repetitions = atoi(words[3]);
    if (bytes == 0 || threads < 1 || threads > LONGEST || repetitions < 0) return 2;
    uint64_t *buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) return 3;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    memset(buffer, 1, bytes);
    pthread_t ids[LONGEST];
    struct share shares[LONGEST];
    size_t each = bytes / sizeof *buffer / (size_t)threads;
    pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
    for (int at = 0; at < threads; at++) {
        shares[at] = (struct share){buffer + each * (size_t)at, each, 0, 0, 0};
        if (pthread_create(&ids[at], NULL, run, &shares[at])) return 3;
    }
    uint64_t sum = 0;
    for (int turn = 0; wanted(turn, repetitions); turn++) {
        pthread_barrier_wait(&gate);
        pthread_barrier_wait(&gate);
        double began = shares[0].began, ended = shares[0].ended;
        for (int at = 1; at < threads; at++) {
            if (shares[at].began < began) began = shares[at].began;
            if (shares[at].ended > ended) ended = shares[at].ended;
        }
        printf("%.3f\n", (double)(each * (size_t)threads * sizeof *buffer) / (ended - began) / 1e9);
        fflush(stdout);
    }
    going_on = 0;
    pthread_barrier_wait(&gate);
    for (int at = 0; at < threads; at++) {
        pthread_join(ids[at], NULL);
        sum += shares[at].sum;
    }
    return sum == 1; /* never: the sum is used, so nothing is left out */
}
