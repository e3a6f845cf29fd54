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
// served longest ago: of two sources that wait and could go, none has 2 while the other has none.
//
// Who needs gates that cross, each of which may be shut whenever another is open, has them reserved; see reservation.
// Let H be the longest time for which a gate stays shut when nobody is let in: that one connection is there, or that
// lies between two of a pace. Where each source needs one set of gates, at most n sources the same gate, and
// k sources several, at most G each, none waits for longer than
//
//	(4 (n + G k) / 3 + 16 k + 6) H,
//
// as long as none of the k, whose turn is earlier, goes at a gate that is reserved for another: each may do so once for each
// reservation, which then takes k H at most instead of H.
//
// Proof. A reservation takes H at most, as nobody else is let in at its gates. It lapses only
// when it began less than H after the first turn in vain. A gate that was reserved for d then rests for 3 d: what takes U while
// it is not reserved takes 4 U / 3 + H.
//
// Who needs one gate alone waits for those before him, H each: R = 4 n H / 3 + H. None whose turn is later
// makes a claim meanwhile. So R after the turn of q, only those who need several precede q.
//
// Let p be the first, by claim, of q and those who precede it. Nobody precedes p, so it claims at its second turn in vain
// at one gate: it has G + 1 turns until then, within 4 (G + 1) H / 3 + H. Whatever is reserved or rests of its gates is
// free after 4 H more, one of them opens within another H, and p goes, or its reservation lapses, within the last H. Before
// one of these turns may go who has waited for longer and whose reservation has lapsed, each once, for 4 H / 3. So each
// of the k takes 4 G H / 3 + 10 H at most, and then it is behind q, until q goes, or its own reservation lapses.
//
// That happens within 2 H of its first turn in vain, which comes within 4 k H / 3 + 7 H / 3 of R. Then each of the
// others has its claim served before q once, and may put off, by 5 H, one that waits to begin:
// 4 G H / 3 + 44 H / 3 for each of the k. The sum is the bound.
//
// A source that needs several sets has its turns for all of them together, and waits the longer. Others
// lose a quarter of one slot, or of a pace, at most.
package conn
