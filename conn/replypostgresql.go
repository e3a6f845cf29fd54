package conn

import (
	"encoding/binary"
	"fmt"
)

const (
	pgStartupHead = 8     // length and code of the first messages of a client
	pgMaxStartup  = 10000 // MAX_STARTUP_PACKET_LENGTH of PostgreSQL
)

// answerPostgreSQL declines encryption, and answers a StartupMessage with an error, of which the head is enough. A client
// that has logged in may get one at any time. A CancelRequest has no answer. (PostgreSQL documentation, "Message Flow".)
func answerPostgreSQL(n *notice, seen []byte) (send []byte, used int, done bool) {
	if n.midway {
		return pgError(n), 0, true
	}
	if len(seen) < pgStartupHead {
		return nil, 0, false
	}
	length, code := binary.BigEndian.Uint32(seen), binary.BigEndian.Uint32(seen[4:])
	switch {
	case length < pgStartupHead || length > pgMaxStartup:
		return nil, 0, true
	case code == pgSSLRequest || code == pgGSSENCRequest:
		if length != pgStartupHead {
			return nil, 0, true
		}
		return []byte{'N'}, pgStartupHead, false
	case code>>16 != 3: // no version of the protocol
		return nil, 0, true
	}
	return pgError(n), 0, true
}

// pgError is an ErrorResponse: too_many_connections.
func pgError(n *notice) []byte {
	b := []byte{'E', 0, 0, 0, 0}
	b = fmt.Appendf(b, "SFATAL\x00VFATAL\x00C53300\x00M%s\x00", n.sentence())
	if s := n.seconds(); s > 0 {
		b = fmt.Appendf(b, "HTry again in %d s.\x00", s)
	}
	b = append(b, 0)
	binary.BigEndian.PutUint32(b[1:], uint32(len(b)-1))
	return b
}
