package conn

import "encoding/binary"

// mysqlError is the ERR packet in place of a server's greeting, or later of the answer to a command: ER_CON_COUNT_ERROR.
// (MySQL internals, "ERR_Packet".)
func mysqlError(n *notice) []byte {
	const code = 1040
	b := []byte{0, 0, 0, 0, 0xff}
	if n.midway {
		b[3] = 1 // the command was packet 0
	}
	b = binary.LittleEndian.AppendUint16(b, code)
	b = append(b, "#08004"...)
	b = append(b, n.sentence()...)
	b[0] = byte(len(b) - 4) // a sentence is short
	return b
}
