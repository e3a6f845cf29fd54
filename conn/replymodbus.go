package conn

import "encoding/binary"

const (
	modbusHead   = 8   // transaction, protocol, length, unit, and function
	modbusMaxADU = 254 // what length, which counts the unit and what follows, may be at most

	modbusException  = 0x80
	modbusServerBusy = 6 // Server Device Busy
)

// answerModbus answers a request with an exception. (MODBUS Messaging on TCP/IP 1.0b, 3.1; Application Protocol 1.1b3, 7.)
func answerModbus(_ *notice, seen []byte) (send []byte, used int, done bool) {
	if len(seen) < modbusHead {
		return nil, 0, false
	}
	length, unit, function := binary.BigEndian.Uint16(seen[4:]), seen[6], seen[7]
	if seen[2] != 0 || seen[3] != 0 || length < 2 || length > modbusMaxADU || function == 0 || function >= modbusException {
		return nil, 0, true
	}
	return []byte{seen[0], seen[1], 0, 0, 0, 3, unit, function | modbusException, modbusServerBusy}, 0, true
}
