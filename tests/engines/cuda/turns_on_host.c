/* engines.cuda.turns compiled for the host: each step that its source makes is a call of `asked`. */

enum { ADD, LOOK, SWAP, CLOCK, SLEEP, FENCE };

typedef unsigned long long (*asked_t)(int what, unsigned word, unsigned old, unsigned new);

static asked_t asked;
static const unsigned *first;

#define __device__
#define look(word) ((unsigned)asked(LOOK, (unsigned)((word) - first), 0, 0))
#define atomicAdd_system(word, more) ((unsigned)asked(ADD, (unsigned)((word) - first), 0, (more)))
#define atomicCAS_system(word, old, new) ((void)asked(SWAP, (unsigned)((word) - first), (old), (new)))
#define clock64() ((long long)asked(CLOCK, 0, 0, 0))
#define __nanosleep(time) ((void)asked(SLEEP, 0, 0, 0))
#define __threadfence() ((void)asked(FENCE, 0, 0, 0))

#include "turns.inc"

unsigned take(asked_t answers) {
    static struct Turn turn;
    first = &turn.next;
    asked = answers;
    return take_turn(&turn);
}

void pass_(asked_t answers, unsigned mine) {
    static struct Turn turn;
    first = &turn.next;
    asked = answers;
    pass_turn(&turn, mine);
}
