package conn

import "encoding/binary"

const (
	smppHead   = 16 // length, command, status and sequence number
	smppMaxPDU = 64 << 10

	smppBindReceiver    = 0x00000001
	smppBindTransmitter = 0x00000002
	smppBindTransceiver = 0x00000009
	smppResponse        = 0x80000000
	smppThrottled       = 0x00000058 // ESME_RTHROTTLED
)

// answerSMPP answers a bind, or any request of a client that has bound before. A response with an error has no body.
// (SMPP 3.4, 3.2 and 4.1.)
func answerSMPP(n *notice, seen []byte) (send []byte, used int, done bool) {
	if len(seen) < smppHead {
		return nil, 0, false
	}
	length, command := binary.BigEndian.Uint32(seen), binary.BigEndian.Uint32(seen[4:])
	if length < smppHead || length > smppMaxPDU || command&smppResponse != 0 {
		return nil, 0, true
	}
	switch command {
	case smppBindReceiver, smppBindTransmitter, smppBindTransceiver:
	default:
		if !n.midway {
			return nil, 0, true
		}
	}
	b := binary.BigEndian.AppendUint32(nil, smppHead)
	b = binary.BigEndian.AppendUint32(b, command|smppResponse)
	b = binary.BigEndian.AppendUint32(b, smppThrottled)
	return append(b, seen[12:smppHead]...), 0, true
}
