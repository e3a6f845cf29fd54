package conn

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// train is a sequence of datagrams of one flow and direction, all of one size except the last,
// that are sent in one system call and pass the kernel as one (UDP_SEGMENT). It holds no
// copies: the data must stay valid until flush.
type train struct {
	flow   *udpFlow
	down   bool // from-downstream
	size   int  // bytes of each datagram except the last
	count  int  // datagrams
	bytes  int
	sealed bool // the last datagram is shorter, so that none can follow

	header  unix.Msghdr
	vectors [maxTrainDatagrams]unix.Iovec
	used    int // vectors in use
	control [controlSize]byte
}

const (
	maxTrainDatagrams = 64    // UDP_MAX_SEGMENTS
	maxTrainBytes     = 65000 // with headers it is at most 65,535 bytes long
)

// add adds datagrams to t, and reports whether they fit: t must be empty, or of the same flow
// and direction.
func (t *train) add(f *udpFlow, down bool, data []byte, size int) bool {
	n := 1
	if size > 0 {
		n = (len(data) + size - 1) / size
	}
	if t.count > 0 {
		fits := t.flow == f && t.down == down && !t.sealed && !f.noGSO && size > 0 && size <= t.size &&
			(size == t.size || n == 1) && t.count+n <= maxTrainDatagrams && t.bytes+len(data) <= maxTrainBytes
		if !fits {
			return false
		}
	} else {
		t.flow, t.down, t.size = f, down, size
	}
	t.sealed = size < t.size || len(data) < n*size
	t.vectors[t.used].Base = unsafe.SliceData(data)
	t.vectors[t.used].SetLen(len(data))
	t.used++
	t.count += n
	t.bytes += len(data)
	return true
}

// append adds datagrams to the train that is being received, and flushes it first if they do not
// fit.
func (b *batch) append(f *udpFlow, down bool, data []byte, size int) {
	if !b.train.add(f, down, data, size) {
		b.train.flush()
		b.train.add(f, down, data, size)
	}
}

// flush sends t and empties it. It reports whether the kernel accepted any of it.
func (t *train) flush() bool {
	if t.count == 0 {
		return false
	}
	counts := t.flow.listener.counts
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
	apart := t.flow.noGSO && t.count > 1 || t.flow.prefix != nil && !t.down
	if !apart {
		errno = t.sendmsg(t.vectors[:t.used], t.count > 1)
	}
	switch {
	case apart:
		bytes, lost = t.sendEach()
	case errno == 0:
		bytes = t.bytes
	case t.count > 1 && errno != unix.EAGAIN:
		// The datagrams exceed the path MTU, or the network card or an IPsec policy on the
		// path cannot split them.
		t.flow.noGSO = true
		bytes, lost = t.sendEach()
	default:
		lost = t.count
	}
	clear(t.vectors[:t.used])
	t.flow, t.count, t.bytes, t.used = nil, 0, 0, 0
	return bytes, lost
}

// sendEach sends each datagram by itself, after its PROXY header if it gets one.
func (t *train) sendEach() (bytes, lost int) {
	var vectors [2]unix.Iovec
	first := 1
	if prefix := t.flow.prefix; prefix != nil && !t.down {
		first = 0
		vectors[0].Base = &prefix[0]
		vectors[0].SetLen(len(prefix))
	}
	for _, part := range t.vectors[:t.used] {
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

// sendmsg sends vectors as one datagram, or with split as several of t.size.
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
		// The error may be pending from an earlier datagram that was refused: try again.
		_, _, errno = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&t.header)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	t.header = unix.Msghdr{}
	return errno
}
