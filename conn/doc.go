// Package conn is the proxy plane: it accepts TCP connections and UDP datagrams,
// forwards them to downstreams, and enforces a policy on the way.
//
// A thread, the loop, does everything: it owns the sockets, the gates at which connections
// wait for admission, the queues in which bytes and datagrams wait for their departure, and the
// buckets in use, and so needs no lock. It sleeps in epoll until a socket is ready or a unit may
// leave, whichever comes first. Only the names of downstreams are resolved elsewhere. There may be several loops, for listeners
// that have nothing in common: see Workers. The first line
// of a file names the thread that owns its types; in the other files, the fields say so.
//
// A connection enters at [tcpPort], passes admission, dials a downstream, and becomes a session of two
// endpoints and two directions. A direction submits grants to the scheduler, and moves the bytes when
// a grant departs. A datagram enters at [udpPort], belongs to a flow, which passes admission once, and
// departs from the scheduler in the same way.
//
// # Workers
//
// A worker is a loop and what belongs to it. Nothing below belongs to two of them, so the proofs in this text hold for each
// as for one loop, and no rate, cap or turn depends on how many there are.
//
// To a worker belong listeners, with their ports, downstreams, checks, breakers, holds and pools; their sessions, flows and pending
// flows; queues, with buckets, bookings and turns; gates, with slots, histories, lines, reservations and tickets; the adapters of limits;
// its timing wheel, epoll, buffers and pipes; the walks that look for dead peers and sample TCP; and a part of the memory for datagrams,
// which is divided evenly: a flood cannot take that of another worker. The first worker, home, also has what hosts share, quotas and penalties.
//
// To the process belong the policy and the table of the buckets that are not in use, behind the lock of [shaper.Shaper]; counters, which are
// atomic; the count of descriptors and pipes, IDs of connections and numbers of tickets; the names of downstreams; and the listing of
// connections.
//
// Which listeners are on one worker is the partition in which two are together if some limit that may apply at both keeps something that they
// would share: a bucket or slots whose key has neither the listener nor the connection, or places to wait, which are of a limit over
// all keys. A limit that only observes counts as one that enforces, so that a bypass moves nothing. Limits that hosts share and those with a
// quota join their listeners with home, and a penalty joins all: it blocks sources everywhere. Of the match of a limit only listeners
// count, because a connection may be to a port, or of a protocol, that its listener has no more. See assignment.
//
// A reload may join what was apart: by a limit of the old policy and one of the new that have a state in common, since connections follow
// from one policy to the other in batches; by a port that goes from one listener to another, with its connections; or by what connections
// of a removed listener still hold. Then one worker ends, and all that it has goes to the other as it is: see merge. This happens at
// the instant of the swap, for which all workers stand still, and one of the threads does the work for all. So at no instant is there a second
// bucket, gate or turn of anything, none is started afresh, and those that wait keep their order, because tickets
// are numbered over all workers. A reload never parts what is together: new listeners get workers of their own, and
// old ones after a restart. A worker without listeners and connections ends with the next reload.
//
// Other threads reach a worker by posting to its loop, under a lock that the swap takes for writing. So what they have posted is
// done before anything moves.
//
// # Fairness
//
// A queue is shared by a hierarchy of nodes: sources; below each source its lanes, which are the
// flows that pass the same later queues; and below each lane its flows. A source with flows of several
// classes is a node for each, and weighs what the class does; all other nodes weigh 1. Where the turns of a
// limit are by prefix or AS first, these are the nodes above the sources, and have the weights. A node is
// backlogged while it has a unit in the queue whose turn has not come. Let a unit be the largest that
// leaves, n the maximum of siblings that are ever backlogged at once, w the weight of a node, r that weight over the
// least of its siblings, and
// H(n) = r + r/(r+1) + ... + r/(r+n-1), which is 1 + 1/2 + ... + 1/n where all weigh the same. Whatever flows open, close,
// reset and reopen, over any interval in which node g is backlogged:
//
//  1. g receives its fair share, the sum over all service of service * w / weights of the nodes backlogged at that
//     time, less at most 1 + H(n) units;
//  2. from its first service on, no sibling receives more for its weight than g, by more than one unit of each for
//     its weight: 2 units if both weigh 1;
//  3. before that, no sibling receives more for its weight than g, by more than 1 + H(n) units for its weight.
//
// Proof. Let s be the start tag of a node and V the virtual time (see fairq.Node). The lowest tag is
// served: V becomes max(V, s), then s grows by c/w for the cost c, and V by c/W where backlogged nodes weigh W.
// A node that becomes backlogged gets s = max(s, V). V never decreases, and the tags of nodes that
// have left are kept until V has reached them. Costs are in units.
//
// No tag is more than 1/w ahead of V: it was not ahead when its last unit was served. No tag of a backlogged node is
// more than H(n)/w behind V. Let S be a set of k backlogged nodes that weigh S, v the least weight, and
// F(S) = S/v + S/(S+v) + ... + S/(S+(n-k)v). By induction over services, arrivals and departures, the lags of the nodes of S,
// each times the weight, add up to at most F(S); a set of one node is what was to be shown. A service adds at most S/W to the
// sum. If it is of a node of S, it takes 1 away. If it is of another node, of weight u, then that one lagged by no less than
// any of S, so that with it the sum was by (S+u)/S as large, and at most F of k + 1 nodes that weigh S + u: the sum of S was at
// most S/(S+u) times that, and has grown by S/W, at most S/(S+u). As u is at least v, that is at most F(S), term by
// term. A node that arrives has no lag, and F is no less with it: its first term is larger by 1 or more, and its last one,
// which was less than 1, is gone. A node that departs leaves smaller sets. With equal weights this is the game of n
// cups in which the fullest is emptied, and no order of service does better: the nodes that are
// served first may leave.
//
// The service of g is the growth of its tag times w, at least the growth of V * w - H(n) - 1, and V * w grows by
// the fair shares: 1. The last unit of a sibling in the interval has a tag of at most that of g,
// or g would be served; so the tag of the sibling grows by at most g's last tag + 1/w - its own first tag, with its own weight. That
// one is at least the tag of g's last unit before the interval, when g's was the lowest: 2. If g
// had none, it is at least V - H(n)/w at the time when g became backlogged, with tag V, or with a
// later tag, which makes it the previous case: 3.
//
// A tag is a whole number, of quarters of a byte for the node's weight. What a division leaves over is kept for the next unit, so it does not add up,
// except that a class of 4 and 5 loses it when a source leaves that lags. But two tags can be equal without it, so 2 and 3 hold but for half a byte,
// and 1 but for half a byte times w.
//
// When a reload changes the weight of a node, its tag is moved so that what it was ahead of V or behind, times its
// weight, stays: the bounds hold for each interval between reloads. A source that gets another class is a new node, and gains the
// unit at most that it was ahead.
//
// A class for which a part f of the service is reserved is one node, above its sources, that weighs what those weigh that are backlogged
// (see fairq.Node.SetFloor). Let K be the number of such classes. In addition to its turns,
//
//  4. over any interval in which such a class is backlogged, it receives f of all service, less at most f * (K + 1) + 1 units, if the
//     parts are at most 1 in all;
//  5. 1, 2 and 3 hold for what nodes receive in turn, where n is what all backlogged nodes weigh at once over the least weight. Of such a class
//     they hold over intervals in which it weighs the same: of what it lags, a source that leaves it takes a part by its weight, even if it has just
//     come. So a class whose sources come and go all the time may receive little more than 4 says.
//
// Proof of 4. Let S be all service so far, and t the tag of the floor of the class. When the class becomes backlogged, t becomes max(t, S). A
// unit of cost c moves t to t + c/f if t was at most S, and otherwise to S + c/f, or leaves it where it is if that is less: the service of
// the class is at least f times the growth of t, and t is never more than 1/f ahead of S. It remains to show that t is never more than K + 1
// behind. Let it be by L, at S. Let y be where the last unit began that was not for a class whose tag was at most t and the service
// then. At y no backlogged class had such a tag, or it had been served. So all tags that were served since then are more than y and at most the
// service then, and a unit of cost c moved each by c/f'. For parts f' the classes received at most f' * (t - y) + 1 unit each with tags from y to t, in all
// t - y + K. Together with the unit at y that is S - y, so S - t is at most K + 1.
//
// Proof of 5. A unit out of turn does not move V. It moves the tag of its class at most to 1/w ahead of V, and never back, so it adds to no lag, and
// no tag is further ahead for it. What else is new is that weights change. Measure costs in units and weights by the least one, let F(S) =
// S + S/(S+1) + ... + S/n, and do as above: the lags of a set S, each times the weight, add up to at most F(S). The step for a service is
// the same. A class that weighs more keeps its lag times its weight, and F does not decrease with S. A class that weighs less keeps its
// lag: those that left lagged as much as the rest of it. The sum then is, as a function of the weight that is left, a line between its values without
// the class and with all of it, where it is at most F; and F is concave, as F(S+1) - F(S) = 1/(S+1) + ... + 1/n. What a class is ahead stays
// as service, whatever it weighs.
//
// A unit under several limits has its turn in one queue after the other, and uses all of them when
// it leaves. Between its turn in a queue and its departure it is not backlogged there, and others go
// first: for the queue it is as if the unit arrived when it leaves. That adds to 2 and 3 one unit
// whose turn had come before, for each lane of a source except one. A unit that had its turn in the
// last queue leaves at the first instant at which all buckets allow it, and those that had their turn
// later delay it by at most one unit in each queue: see booking. So a queue is work conserving,
// except that it idles for a unit that was delayed there, for at most the time that one unit takes;
// and no unit waits for a limit that does not apply to it.
//
// # Admission
//
// At a gate, which may be that of a listener's downstreams, the units are connections, and the source
// that was served longest ago goes first: of two sources that wait and could be served, neither is
// served twice while the other is not served. A source that another one's reservation keeps out could
// not be served. A source with connections of several classes is a source for each.
//
// A class has a priority, and a ticket of a higher one is before all of lower ones: of two sources that wait and could be served,
// that of the higher priority is. What follows is about the sources of one priority while none of a higher one waits. Those below
// count only as H, for the slots that they hold: they keep no reservation from a source above. If those of a higher priority always
// wait, those below are not served.
//
// A class with fewer connections in flight at a gate than the limit reserves for it goes before all others at that gate, while it has
// waiters: a class that waits has its part after as many connections there have ended as it lacks. Sources of other classes wait for that
// in addition, once for each connection of such a class that ends: it has no more than its part in this way.
//
// Where the turns of a limit are by prefix or AS first, these have the tickets at its gates, and the sources below take turns for what is
// theirs in the same way: while a connection waits, no sibling of a node that it is below is served twice while that node is not. The bounds
// on waits hold with these in place of sources, where no gates cross.
//
// A source whose gates cross, so that each may be shut whenever another is open, gets them reserved; see
// reservation. A source waits from its arrival, or its last service, until it is served, is refused, or
// leaves. It gets a ticket when it begins to wait, and a new one when it is served; the lowest ticket at a
// gate is tried first. An attempt fails if the gate where the source waits would serve it, and another gate
// that it needs is shut.
//
// Let each source need one set of gates. Of the sources that wait at one time, let at most n need the same
// gate, and k need several, at most G each. Let H be the longest time for which a gate stays shut when no
// source is served: for which one connection or flow lasts, or the interval between two new connections at
// their rate. Let D be the longest duration of a reservation. Then no source waits longer than
//
//	(4 n / 3 + (G + 4) k) H + 13 k D.
//
// D is at most k H: H, and H more for each source that is served at the reserved gates meanwhile because its
// ticket is earlier. It is twice that if downstreams are among the gates, since these are not reserved; all
// downstreams of a listener are one gate here. After a reload all wait again, in the order of their tickets.
//
// Proof. Let the rank of a source be its ticket, or the end of its last reservation if that was later: claims
// are served by rank. A source that is served, or has had a reservation, ranks behind all that wait then.
//
// Reservations. Nothing that is reserved goes to sources with a later ticket. Those with an earlier ticket also
// need several gates, or there had been no claim. Each is served once, since its ticket is later then. When
// none of them was served for H, all gates are open, and the source is served: D is at most k H. With
// downstreams, the other gates are open after H, and the downstreams after another H. A reservation lapses after
// d if it began d after the first failed attempt. So d is less than D, and none lapses later than 2 D after that
// attempt. Gates rest for 3 d after it, so the next one that lapses takes at least 5 d: all lapsed reservations
// of a source take at most 5 D / 4.
//
// A source that needs one gate waits for those before it, H each. What takes U while a gate is not reserved
// takes 4 U / 3 + D there, since it rests for 3 d after d. So the source waits for at most R = 4 n H / 3 + D: no
// source with a later ticket claims its gate meanwhile.
//
// Let q be a source that needs several. R after its ticket, no source waits that needs one gate and has a ticket
// before that of q. Let p be the first, by rank, of all that need several and wait, and let its rank be before
// the ticket of q. Then nothing keeps p from a claim. It is tried within H at each gate to which it moves, and
// claims at the second failure at the same gate, its (G + 1)th attempt at the latest. Now it is next at all its
// gates. A reservation or a rest there ends within 4 D; within H one of the gates opens, and the reservation of p
// begins. Within D it is served, or its reservation lapses. Then it is behind q, after (G + 2) H + 5 D.
//
// Only a source with a ticket before that of p, whose reservation has lapsed, delays the attempts of p: by H when
// it is served, which happens once, and by its reservations, 5 D / 4 + D. That is less than what was counted for
// it in the role of p. If it had that role, its reservation lapsed, and it took H + 2 D until then: both together
// are less as well.
//
// So (k - 1) ((G + 2) H + 5 D) after R, only q has a rank before the ticket of q. Within H of that, q has had a
// failed attempt. Within 2 D more its last reservation that lapses has ended, and within G H more it claims. Let f
// be the first, by rank, of all that claim. Its reservation begins within 4 D + H, unless a source claims whose
// rank is before that of f. Each of the k - 1 others does so once, and has one reservation, before it ranks behind
// q. So that of q begins within (2 k - 1) (4 D + H), and q is served within D. The sum is less than the bound.
//
// A source that needs several sets has one ticket for all of them, and so waits longer. Other sources lose a
// quarter of one slot, or of a rate of new connections, in the long run.
package conn
