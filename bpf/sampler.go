package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"shaperd/shaper"
)

// sampler reads the samples that programs take of packets.
type sampler struct {
	reader *ringbuf.Reader
	losses *ebpf.Map
	lost   kernelLosses // so far
	record ringbuf.Record
	read   []kernelSample
	seed   maphash.Seed // of connections' hashes
}

// sampleDistance is how many packets one sample stands for: of those that passed and those
// that were refused, as sample.h has it.
var sampleDistance = [...]float64{64, 16}

// sampleMost bounds what is read in one go: the ring holds 2,979.
const sampleMost = 4096

func newSampler(k *kernel) (*sampler, error) {
	r, err := ringbuf.NewReader(k.Samples)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", kernelMapSamples, err)
	}
	r.SetDeadline(time.Unix(1, 0)) // a read takes what is there, and never waits
	s := &sampler{reader: r, losses: k.SampleLosses, seed: maphash.MakeSeed()}
	if s.lost, err = s.count(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *sampler) close() { _ = s.reader.Close() }

// count sums up how many samples of each kind were lost on all CPUs.
func (s *sampler) count() (sum kernelLosses, err error) {
	var cpus []kernelLosses
	if err := s.losses.Lookup(uint32(0), &cpus); err != nil {
		return sum, fmt.Errorf("read %s: %w", kernelMapSampleLosses, err)
	}
	for _, c := range cpus {
		for kind, n := range c.Samples {
			sum.Samples[kind] += n
		}
	}
	return sum, nil
}

// next reads the samples there are, and returns how many packets each one stands for, by
// kind: what was lost is spread over the others. The samples are valid until the next
// call.
func (s *sampler) next() (samples []kernelSample, weight [len(sampleDistance)]float64, err error) {
	s.read = s.read[:0]
	var got [len(sampleDistance)]float64
	for len(s.read) < sampleMost {
		err := s.reader.ReadInto(&s.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, weight, fmt.Errorf("read %s: %w", kernelMapSamples, err)
		}
		sample := *(*kernelSample)(unsafe.Pointer(&s.record.RawSample[0]))
		got[sample.Refused]++
		s.read = append(s.read, sample)
	}
	lost, err := s.count()
	if err != nil {
		return nil, weight, err
	}
	for kind, distance := range sampleDistance {
		weight[kind] = distance * (1 + float64(lost.Samples[kind]-s.lost.Samples[kind])/max(got[kind], 1))
	}
	s.lost = lost
	return s.read, weight, nil
}

// flow returns what a sample taken at an attachment is to a policy.
func (s *sampler) flow(k *kernelSample, p *shaper.Policy, attachment string) (shaper.Flow, shaper.Route) {
	var tuple [37]byte
	for i := range k.Source {
		binary.BigEndian.PutUint32(tuple[4*i:], k.Source[i])
		binary.BigEndian.PutUint32(tuple[16+4*i:], k.Destination[i])
	}
	binary.BigEndian.PutUint16(tuple[32:], k.SourcePort)
	binary.BigEndian.PutUint16(tuple[34:], k.Port)
	tuple[36] = k.Transport
	f := shaper.Flow{
		Source: netip.AddrFrom16([16]byte(tuple[:16])).Unmap(), Destination: netip.AddrFrom16([16]byte(tuple[16:])).Unmap(),
		Port: k.Port, Listen: p.AttachIndex(attachment), Connection: maphash.Bytes(s.seed, tuple[:]),
	}
	return f, shaper.Route{ASN: k.Asn, ToDownstream: shaper.Set(k.Set)}
}

// rank adds what samples say to the rankings of sources, and of the limits' keys.
func (p *Plane) rank() error {
	samples, weight, err := p.sampler.next()
	now := p.clock.Now()
	names := map[uint8]string{}
	for name, number := range p.numbers.attachments {
		names[uint8(number)] = name
	}
	for i := range samples {
		k := &samples[i]
		if p.policy == nil || k.Generation != p.kernel.Generation {
			continue // limits have other numbers now
		}
		times := weight[k.Refused]
		passed := shaper.Tally{Bytes: uint64(float64(k.Bytes) * times)}
		waited := shaper.Tally{Bytes: passed.Bytes, Waited: time.Duration(float64(k.Waited) * times)}
		refused := shaper.Tally{Dropped: uint64(float64(k.Segments) * times)}
		f, r := p.sampler.flow(k, p.policy, names[k.Place])
		for limit := range r.ToDownstream.All {
			did := passed
			switch by := limit == int(k.Limit); {
			case by && k.Refused != 0:
				did = refused
			case by:
				did = waited
			case k.Refused != 0:
				continue
			}
			p.policy.State(limit).Keys.Add(p.policy.Key(limit, &f, r), did, now)
		}
		switch {
		case k.Observed != 0:
			p.shaper.Note(f.Source, passed, now)
		case k.Refused != 0:
			p.shaper.Note(f.Source, refused, now)
		default:
			p.shaper.Note(f.Source, waited, now)
		}
	}
	return err
}
