// Owner: the loop's thread.

package conn

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// notice is what a refused client is told.
type notice struct {
	reply  string           // name of a protocol, or a text
	limit  string           // that has refused it; "" for a breaker
	reason string           // a [shaper.Reason], or that a breaker is open
	after  time.Duration    // when it may try again, or 0 if that is not known
	rate   shaper.Frequency // of new connections, if that is used up; otherwise 0
	midway bool             // the client has spoken with a downstream before
}

// replyProtocol is how a refused client is told in a protocol.
type replyProtocol struct {
	// serverFirst says that a client of the protocol waits for the server's first word.
	serverFirst bool

	// answer returns what to send to a client that has sent seen since it was last answered, how many bytes of that it
	// answers, and whether the conversation is over. Before that, more is needed if it answers nothing. It keeps nothing, so
	// that it does not matter in which pieces bytes arrive.
	answer func(n *notice, seen []byte) (send []byte, used int, done bool)
}

// maxReplyInput is how much of what a client sends is looked at: what the longest conversation needs, in which a client of
// PostgreSQL asks for both kinds of encryption before it says who it is.
const maxReplyInput = 3 * pgStartupHead

var replyProtocols = map[string]*replyProtocol{
	shaper.ReplyHTTP429:    {answer: template(http429)},
	shaper.ReplyHTTP503:    {answer: template(http503)},
	shaper.ReplyPostgreSQL: {answer: answerPostgreSQL},
	shaper.ReplyMySQL:      {serverFirst: true, answer: answerMySQL},
	shaper.ReplyRedis:      {answer: template(func(n *notice) []byte { return fmt.Appendf(nil, "-ERR %s\r\n", n.sentence()) })},
	shaper.ReplySMTP:       {serverFirst: true, answer: template(func(n *notice) []byte { return fmt.Appendf(nil, "421 4.7.0 %s\r\n", n.sentence()) })},
	shaper.ReplySMPP:       {answer: answerSMPP},
	shaper.ReplyModbus:     {answer: answerModbus},
}

// textReply is a text of the configuration.
var textReply = &replyProtocol{answer: template((*notice).fill)}

// conversation is what is said between a refused client and shaperd.
type conversation struct {
	*replyProtocol
	notice   notice
	input    [maxReplyInput]byte // what the client has sent
	received int                 // bytes of it
	answered int                 // bytes of it that were answered
}

// next answers what was received. It returns what to send, whether there may be more to answer, and whether that was all.
// If neither, more is to be received first, for which there is room.
func (c *conversation) next() (send []byte, goesOn, over bool) {
	send, used, done := c.answer(&c.notice, c.input[c.answered:c.received])
	c.answered += used
	return send, used > 0, done || used == 0 && c.received == len(c.input)
}

// template returns the answer of a protocol that does not depend on what the client sends.
func template(text func(*notice) []byte) func(*notice, []byte) ([]byte, int, bool) {
	return func(n *notice, _ []byte) ([]byte, int, bool) { return text(n), 0, true }
}

// protocolOf returns the protocol of a reply, which is the name of one or a text.
func protocolOf(reply string) *replyProtocol {
	if p := replyProtocols[reply]; p != nil {
		return p
	}
	return textReply
}

// unknownRetry is what a text tells if it is not known when to try again: a placeholder needs a value.
const unknownRetry = time.Minute

// fill returns the text with values in place of placeholders.
func (n *notice) fill() []byte {
	after := n.seconds()
	if after == 0 {
		after = int64(unknownRetry.Seconds())
	}
	return []byte(strings.NewReplacer(shaper.RetryAfter, strconv.FormatInt(after, 10), shaper.ReplyLimit, n.limit, shaper.ReplyReason, n.reason).Replace(n.reply))
}

// seconds returns when the client may try again, in seconds, or 0 if that is not known.
func (n *notice) seconds() int64 { return int64((n.after + time.Second - 1) / time.Second) }

// sentence says why the client is refused, and when it may try again.
func (n *notice) sentence() string {
	switch s := n.seconds(); s {
	case 0:
		return n.cause()
	case 1:
		return n.cause() + ", try again in 1 second"
	default:
		return fmt.Sprintf("%s, try again in %d seconds", n.cause(), s)
	}
}

// cause says why the client is refused.
func (n *notice) cause() string {
	switch n.reason {
	case shaper.Blocked.String():
		return "connections are blocked"
	case shaper.ShedLoad.String():
		return "server is overloaded"
	case shaper.BreakerOpen.String():
		return "server is unavailable"
	}
	return "too many connections"
}

// tellsTime reports whether a client with this reply is told when to try again.
func tellsTime(reply string) bool {
	switch reply {
	case shaper.ReplySMPP, shaper.ReplyModbus:
		return false // their codes say no more than that it was too much
	}
	return replyProtocols[reply] != nil || strings.Contains(reply, shaper.RetryAfter)
}

// spread returns a time from d to twice as long: of clients that are refused at once, and of which nobody knows when they
// would be served, not all come back at once.
func spread(d time.Duration) time.Duration {
	d = max(d, time.Second)
	return d + rand.N(d+1)
}
