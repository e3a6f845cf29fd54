// Owner: Plane.mu.

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

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// sampler reads the packet samples of the programs.
type sampler struct {
	reader  *ringbuf.Reader
	losses  *ebpf.Map
	lost    kernelLosses // at the last reading
	record  ringbuf.Record
	samples []kernelSample
	seed    maphash.Seed // for the hashes of connections
}

// sampleDistance is the mean distance of samples, in packets: of passed and of refused packets.
var sampleDistance = [...]float64{float64(kernelSampleIntervalPASSED_INTERVAL), float64(kernelSampleIntervalREFUSED_INTERVAL)}

// maxSamples is the maximum of samples in one reading: the ring holds 2,979.
const maxSamples = 4096

func newSampler(k *kernel) (*sampler, error) {
	r, err := ringbuf.NewReader(k.Samples)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", kernelMapSamples, err)
	}
	r.SetDeadline(time.Unix(1, 0)) // reads never wait
	s := &sampler{reader: r, losses: k.SampleLosses, seed: maphash.MakeSeed()}
	if s.lost, err = s.countLost(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *sampler) close() { _ = s.reader.Close() }

// countLost returns the number of lost samples of each kind on all CPUs.
func (s *sampler) countLost() (sum kernelLosses, err error) {
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

// readSamples reads the pending samples, and returns the number of packets that each represents, by
// kind: the others stand for lost samples too. The samples are valid until the next call.
func (s *sampler) readSamples() (samples []kernelSample, weight [len(sampleDistance)]float64, err error) {
	s.samples = s.samples[:0]
	var got [len(sampleDistance)]float64
	for len(s.samples) < maxSamples {
		err := s.reader.ReadInto(&s.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, weight, fmt.Errorf("read %s: %w", kernelMapSamples, err)
		}
		sample := *(*kernelSample)(unsafe.Pointer(&s.record.RawSample[0]))
		got[sample.Refused]++
		s.samples = append(s.samples, sample)
	}
	lost, err := s.countLost()
	if err != nil {
		return nil, weight, err
	}
	for kind, distance := range sampleDistance {
		weight[kind] = distance * (1 + float64(lost.Samples[kind]-s.lost.Samples[kind])/max(got[kind], 1))
	}
	s.lost = lost
	return s.samples, weight, nil
}

// flow returns the flow and route under a policy of a sample from an attachment.
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
		Port: k.Port, Origin: p.AttachmentIndex(attachment), Connection: maphash.Bytes(s.seed, tuple[:]),
	}
	return f, shaper.Route{ASN: k.Asn, Country: shaper.Country(k.Country), ToDownstream: shaper.Set(k.Set)}
}

// updateRankings adds the samples to the rankings of sources and of the limits' keys.
func (p *Plane) updateRankings() error {
	samples, weight, err := p.sampler.readSamples()
	now := p.clock.Now()
	names := map[uint8]string{}
	for name, number := range p.numbers.attachments {
		names[uint8(number)] = name
	}
	for i := range samples {
		k := &samples[i]
		if p.policy == nil || k.Generation != p.kernel.Generation {
			continue // limits may be numbered differently now
		}
		times := weight[k.Refused]
		passed := topk.Usage{Bytes: uint64(float64(k.Bytes) * times)}
		waited := topk.Usage{Bytes: passed.Bytes, Waited: time.Duration(float64(k.Delay) * times)}
		refused := topk.Usage{Dropped: uint64(float64(k.Segments) * times)}
		f, r := p.sampler.flow(k, p.policy, names[k.AttachId])
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
			p.shaper.Record(f.Source, passed, now)
		case k.Refused != 0:
			p.shaper.Record(f.Source, refused, now)
		default:
			p.shaper.Record(f.Source, waited, now)
		}
	}
	return err
}
