// Package conn is the proxy plane: it accepts TCP connections and UDP datagrams,
// forwards them to downstreams, and holds them to a policy on the way.
//
// One thread does it all, the loop: it owns the sockets, the gates at which
// connections wait for a slot, the lines in which bytes and datagrams wait for
// their departure, and the buckets in use, and so needs no lock. It sleeps in epoll
// until a socket is ready or something may leave, whichever is first. Only names of
// downstreams are looked up elsewhere.
//
// # Fairness
//
// A line is shared by its members: sources, below each source its lanes, the flows that go on to
// the same lines, and below each lane its flows. A member waits as long as it has a unit in the
// line whose turn has not come. Let a unit be the largest that leaves, n the most
// members that ever wait at once, and H(n) = 1 + 1/2 + ... + 1/n. Whatever members open,
// close, reset and open again, over any interval in which g waits:
//
//  1. g gets its part, the sum over all that leaves of what leaves / who waits then, less at
//     most 1 + H(n) units;
//  2. once g had its first turn, no other gets more than 2 units more than g;
//  3. until then, no other gets more than 1 + H(n) units more than g.
//
// The proof. Let s be the tag of a member and V the virtual time (see node). The lowest tag
// is served: V becomes max(V, s), then s grows by the cost c and V by c over the m members
// that wait. Who comes gets s = max(s, V). V never goes back, and tags of who has left are kept
// until V has come to them. Costs are in units.
//
// No tag is more than 1 ahead of V: it was not when its unit was served. No tag of who waits
// is more than H(n) behind V: by induction over services, arrivals and departures, the k that
// are furthest behind are so by at most 1 + H(n) - H(k) in the mean, for each k. A service adds
// 1/m to each, m > k, and takes the one that is furthest behind out of the k + 1 that were; who comes
// is not behind; who goes leaves those that were less so. It is the game of n cups of which the
// fullest is emptied, and no order of service does better: those who are served first may leave.
//
// What g gets is what its tag grows by, at least V's growth - H(n) - 1, and V grows by the parts: 1.
// Of another member, the last unit in the interval has a tag of at most that of g, or g would be
// served; so it gets at most g's last tag + 1 - its own first one. That one is at least the tag
// of g's last unit before the interval, when g's was the lowest: 2. If g had none, it is at
// least V - H(n) when g came, at V or at a tag that makes it the case before: 3.
//
// A unit under several limits has its turn in one line after the other, and uses them all when it
// leaves. Between its turn in a line and that, it does not wait there, and others go before it: the
// line is used as if it came when it leaves. That adds to 2 and 3, for each lane of a source but
// one, a unit whose turn had come before. A unit that had its turn in the last line leaves at the first
// instant at which all let it, and who had his later delays it by one unit in each line at most: see
// booking. So a line stands still, with somebody in it who could go, only for a unit that was delayed there,
// at most for as long as one unit takes; and nobody waits for what he is not under.
//
// At a gate, that of the downstreams of a listener among them, units are connections and turns go to whom was
// served longest ago: of two sources that wait and could go, none has 2 while the other has none. Who is kept out by
// what is reserved for another could not go.
//
// Who needs gates that cross, each of which may be shut whenever another is open, has them reserved; see reservation. A
// source waits from when it comes, or was let in last, until it is let in again, is refused, or leaves. Its turn is in vain
// when the gate where it waits would let it in, and another one that it needs is shut.
//
// Let each source need one set of gates. Of those that wait at one time, let at most n need the same gate, and k need
// several, at most G each. Let H be the longest for which a gate stays shut when nobody is let in: for which one
// connection or flow stays, or the interval between two that a pace lets in. Let D be the longest that a reservation
// lasts. Then none waits for longer than
//
//	(4 n / 3 + (G + 4) k) H + 13 k D.
//
// D is k H at most: H, and H more for each source that is let in at the reserved gates meanwhile, as its turn is earlier. It
// is twice that where downstreams are among the gates, as nothing is reserved of those; all of a listener's are one gate
// here. After a reload all wait again, in the order of their turns.
//
// Proof. Let the rank of a source be its turn, or the end of its last reservation if that was later: claims are served by
// rank. Whoever is let in, or has had a reservation, ranks behind all who wait then.
//
// Reservations. Of what is reserved, nothing goes to those whose turn is later. Those whose turn is earlier need several
// gates too, or there had been no claim. Each is let in once, as its turn is later then. When none of them was for H, all
// gates are open, and the source goes: D is k H at most. With downstreams, the other gates are open after H, and they are
// after another H. A reservation lapses after d when it began d after the first turn in vain. So d is less than D, and
// none lapses later than 2 D after that turn. Gates rest for 3 d after it, so the next one that lapses takes at
// least 5 d: all of a source that lapse take 5 D / 4 at most.
//
// Who needs one gate waits for those before it, H each. What takes U while a gate is not reserved takes 4 U / 3 + D
// there, as it rests for 3 d after d. So it waits for R = 4 n H / 3 + D at most: none whose turn is later claims its gate
// meanwhile.
//
// Let q need several. R after its turn, nobody waits who needs one gate and whose turn is before that of q. Let p be
// the first, by rank, of all that need several and wait, and its rank be before the turn of q. Then nobody keeps p from
// a claim. It has a turn within H at each gate to which it comes, and claims at the second one at the same gate, its
// (G + 1)th turn at the latest. Now it is next at all its gates. What is reserved there, or rests, is free within 4 D; within
// H one of the gates opens, and its reservation begins. Within D it goes, or that lapses. It is behind q then, after
// (G + 2) H + 5 D.
//
// Only a source whose turn is before that of p, and whose reservation has lapsed, delays the turns of p: by H when it is let
// in, which happens once, and by what is reserved for it, 5 D / 4 + D. That is less than what was counted for it as
// a p. If it was one, its reservation lapsed, and it took H + 2 D until then: both together are less as well.
//
// So (k - 1) ((G + 2) H + 5 D) after R, none but q has a rank before the turn of q. Within H of that, q has had a turn in
// vain. Within 2 D more its last reservation that lapses has ended, and within G H more it claims. Let f be the
// first, by rank, of all that claim. Its reservation begins within 4 D + H, unless one claims whose rank is before that of f.
// Each of the k - 1 others does so once, and has one reservation, before it ranks behind q. So that of q begins
// within (2 k - 1) (4 D + H), and q goes within D. The sum is less than the bound.
//
// A source that needs several sets has its turns for all of them together, and waits the longer. Others lose
// a quarter of one slot, or of a pace, in the long run.
package conn
