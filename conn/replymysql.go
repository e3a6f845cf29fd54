package conn

import "encoding/binary"

const (
	mysqlHead               = 4 // length and sequence number
	mysqlTooManyConnections = 1040
)

// answerMySQL sends an ERR packet in place of the greeting, or to what a client sends that has had one: its number follows
// that of the client's packet. (MySQL documentation, "Protocol Basics", "ERR_Packet".)
func answerMySQL(n *notice, seen []byte) (send []byte, used int, done bool) {
	b := make([]byte, mysqlHead, 128)
	if n.midway {
		if len(seen) < mysqlHead {
			return nil, 0, false
		}
		b[3] = seen[3] + 1
	}
	b = append(b, 0xff)
	b = binary.LittleEndian.AppendUint16(b, mysqlTooManyConnections)
	b = append(b, "#08004"...)
	b = append(b, n.sentence()...)
	b[0] = byte(len(b) - mysqlHead) // a sentence is short
	return b, 0, true
}
