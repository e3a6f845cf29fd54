package conn

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// train is datagrams of one flow and direction, of one size but for the last, that
// leave in one system call and go through the kernel as one (UDP_SEGMENT). It holds
// no copies: what was added is valid until the train has left.
type train struct {
	flow  *udpFlow
	down  bool
	size  int // of each datagram but the last
	count int
	bytes int
	ended bool // by one that is shorter

	header  unix.Msghdr
	vectors [maxTrain]unix.Iovec
	parts   int // vectors in use
	control [controlSize]byte
}

const (
	maxTrain      = 64    // datagrams, UDP_MAX_SEGMENTS
	maxTrainBytes = 65000 // with headers it is at most 65,535 bytes long
)

// add adds datagrams to t, which is empty or of the same flow and direction. It
// returns false when they have no place.
func (t *train) add(f *udpFlow, down bool, data []byte, size int) bool {
	n := 1
	if size > 0 {
		n = (len(data) + size - 1) / size
	}
	if t.count > 0 {
		joins := t.flow == f && t.down == down && !t.ended && !f.apart && size > 0 && size <= t.size &&
			(size == t.size || n == 1) && t.count+n <= maxTrain && t.bytes+len(data) <= maxTrainBytes
		if !joins {
			return false
		}
	} else {
		t.flow, t.down, t.size = f, down, size
	}
	t.ended = size < t.size || len(data) < n*size
	t.vectors[t.parts].Base = unsafe.SliceData(data)
	t.vectors[t.parts].SetLen(len(data))
	t.parts++
	t.count += n
	t.bytes += len(data)
	return true
}

// load adds datagrams to the train of what has just been received, or to the next one.
func (b *batch) load(f *udpFlow, down bool, data []byte, size int) {
	if !b.train.add(f, down, data, size) {
		b.train.leave()
		b.train.add(f, down, data, size)
	}
}

// leave puts t on the wire, and empties it. It reports whether the kernel took any of
// it.
func (t *train) leave() bool {
	if t.count == 0 {
		return false
	}
	counts := t.flow.site.counts
	moved, of := &counts.ToDownstream, &t.flow.up
	if t.down {
		moved, of = &counts.FromDownstream, &t.flow.down
	}
	count := t.count
	bytes, lost := t.send()
	moved.Add(uint64(bytes))
	of.moved += uint64(bytes)
	counts.SendErrors.Add(uint64(lost))
	return lost < count
}

func (t *train) send() (bytes, lost int) {
	errno := unix.EINVAL
	apart := t.flow.apart && t.count > 1 || t.flow.prefix != nil && !t.down
	if !apart {
		errno = t.sendmsg(t.vectors[:t.parts], t.count > 1)
	}
	switch {
	case apart:
		bytes, lost = t.sendApart()
	case errno == 0:
		bytes = t.bytes
	case t.count > 1 && errno != unix.EAGAIN:
		// They are too large for the way, or the card or an IPsec policy on it cannot
		// split them.
		t.flow.apart = true
		bytes, lost = t.sendApart()
	default:
		lost = t.count
	}
	clear(t.vectors[:t.parts])
	t.flow, t.count, t.bytes, t.parts = nil, 0, 0, 0
	return bytes, lost
}

// sendApart sends each datagram by itself, behind its header if there is to be one.
func (t *train) sendApart() (bytes, lost int) {
	var vectors [2]unix.Iovec
	first := 1
	if prefix := t.flow.prefix; prefix != nil && !t.down {
		first = 0
		vectors[0].Base = &prefix[0]
		vectors[0].SetLen(len(prefix))
	}
	for _, part := range t.vectors[:t.parts] {
		for data := unsafe.Slice(part.Base, part.Len); ; {
			n := min(t.size, len(data))
			vectors[1].Base = unsafe.SliceData(data)
			vectors[1].SetLen(n)
			if t.sendmsg(vectors[first:], false) == 0 {
				bytes += n
			} else {
				lost++
			}
			if data = data[n:]; len(data) == 0 {
				break
			}
		}
	}
	return bytes, lost
}

// sendmsg sends vectors as one datagram, or as several.
func (t *train) sendmsg(vectors []unix.Iovec, split bool) unix.Errno {
	fd, used := t.flow.fd, 0
	t.header = unix.Msghdr{Iov: &vectors[0]}
	t.header.SetIovlen(len(vectors))
	if t.down {
		to := &t.flow.to
		fd = t.flow.key.port.fd
		t.header.Name, t.header.Namelen = (*byte)(unsafe.Pointer(&to.name)), to.nameLen
		used = copy(t.control[:], to.control[:to.controlLen])
	}
	if split {
		c := (*unix.Cmsghdr)(unsafe.Pointer(&t.control[used]))
		c.Level, c.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		c.SetLen(unix.CmsgLen(2))
		binary.NativeEndian.PutUint16(t.control[used+unix.SizeofCmsghdr:], uint16(t.size))
		used += unix.CmsgSpace(2)
	}
	if used > 0 {
		t.header.Control = &t.control[0]
		t.header.SetControllen(used)
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&t.header)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 && errno != unix.EAGAIN && !t.down {
		// It may have been of an earlier datagram, that somebody refused.
		_, _, errno = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&t.header)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	t.header = unix.Msghdr{}
	return errno
}
