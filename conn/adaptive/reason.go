package adaptive

// Reason is why a limit has changed.
type Reason uint8

const (
	Bounds           Reason = iota // the operator's bounds have changed
	MorePays                       // more in flight gives more throughput
	MoreCostsNothing               // a climb has ended: more in flight gives little
	LessCostsNothing               // less in flight gives the same throughput
	LessCosts                      // a descent has ended: less in flight gives less throughput
	Demand                         // a climb has ended: no more is asked for
	Slow                           // a climb has ended: answers take too long, or the most is reached
	Fall                           // throughput has fallen by a third
	Crowd                          // the server is slow and all clients are in it
	Failures                       // a tenth of the connections fail
	Futile                         // and fewer in flight do not help
	Silence                        // nothing is answered, and all places are taken
	Resumed                        // another host has led before, or a trial could not be ended
)

var reasons = [...]string{
	Bounds: "bounds", MorePays: "more-pays", MoreCostsNothing: "more-gives-little", LessCostsNothing: "less-costs-nothing",
	LessCosts: "less-costs", Demand: "demand", Slow: "slow", Fall: "throughput-fell", Crowd: "crowd", Failures: "failures",
	Futile: "failures-stay", Silence: "silence", Resumed: "resumed",
}

func (r Reason) String() string { return reasons[r] }
