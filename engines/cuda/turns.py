"""Turns that blocks of kernels take, of all processes of a GPU: what is done in a turn is done by one block at a time.

Problem: the blocks belong to different processes, and any of them may be killed at any instant, with its turn or in the queue.

Solution: a ticket lock whose tickets pass on without their owners. A turn is two words in the GPU's memory: `next`, the ticket
that the next block gets, and `serving`, the ticket whose turn it is. A block takes a ticket (one addition), waits until that is
served, and passes on (`serving` becomes one more, if it still is the block's own). So the turn goes round in the order in which
blocks came. Who waits and sees the same ticket served for PATIENCE takes its owner for dead and passes on in its place, by the
same compare and swap, so of all that do only one succeeds. What follows:

- As long as a block that lives passes on within PATIENCE, and fewer than MOST in a row were killed, no two have the turn at
  once, and those that live get it in order.
- Each ticket of a block that was killed costs those that wait PATIENCE, once. Who has waited for MOST dead owners is next
  itself: nothing waits for longer than for those before it and MOST times PATIENCE, whatever is in the words.
- A block that was taken for dead, as it had the turn for too long (a debugger, a device that was taken away for a time), finds
  `serving` changed and passes nothing on. For that moment two had the turn, and nothing else has happened.
- Words that something else has overwritten become right again by themselves: who finds `serving` behind is served after MOST
  times PATIENCE, who finds it ahead of `next`, which else never happens, sets it to its own ticket.

tests/engines/cuda/test_turns.py tries that with kills after every step and with any words, by a model in Python that makes the
same steps as this source.

Rejected: a rate instead of turns (a generic cell rate algorithm, ITU-T I.371: one word with the time from which the next piece
may be written). It has no holder that could die. But the rate would be a fact of the bus, which differs by generation and width
and falls when the host's memory is busy: where it is too high nothing is held back, and a piece that takes longer than its time
has a second writer beside it, which is what costs neighbours 5 times their time. With turns the bus itself says when a piece
has gone.

PATIENCE is in cycles of the SM's clock (1.1 ms at 1.98 GHz), which needs no reading of %globaltimer, whose resolution differs
by GPU (32 ns to 1 us) and which the host may set. A turn of 128 KiB lasts 3 us at 45 GB/s, and one of two pieces 65 us on a
bus of 4 GB/s.
"""

LOOK = r"""
__device__ unsigned look(const unsigned *word) { return *reinterpret_cast<const volatile unsigned *>(word); }
"""
"""CUDA C++: reads a word of memory, past all caches of the SM, each time that it is called."""
TURNS = r"""
struct Turn { unsigned next, serving, apart[30]; };

enum { PATIENCE = 1 << 21, MOST = 8 };

// Wait for this block's turn, and return its ticket. By one thread.
static __device__ unsigned take_turn(struct Turn *turn) {
    const unsigned mine = atomicAdd_system(&turn->next, 1u);
    unsigned seen = look(&turn->serving), passed = 0;
    unsigned long long since = clock64();
    while ((int)(seen - mine) < 0) {
        __nanosleep(100);
        const unsigned found = look(&turn->serving);
        const unsigned long long now = clock64();
        if (found != seen) {
            seen = found;
            since = now;
        } else if (now - since >= PATIENCE) {
            atomicCAS_system(&turn->serving, seen, ++passed < MOST ? seen + 1 : mine);
            since = now;
        }
    }
    if (seen != mine) {  // Another block has passed on in this block's place, or the words are wrong.
        seen = look(&turn->serving);
        __threadfence();
        if ((int)(look(&turn->next) - seen) < 0) atomicCAS_system(&turn->serving, seen, mine);
    }
    return mine;
}

// Pass on the turn of this ticket. By one thread.
static __device__ void pass_turn(struct Turn *turn, unsigned mine) { atomicCAS_system(&turn->serving, mine, mine + 1); }
"""
"""C, and CUDA C++ after LOOK."""
TURN_BYTES = 128
