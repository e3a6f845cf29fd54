package bpf

import (
	"slices"

	"shaperd.dev/shaperd/shaper"
)

// image is a policy in the format of the programs.
type image struct {
	policy  kernelPolicy
	lines   []kernelLine
	sets    map[shaper.Set]uint32
	setList []shaper.Set // sets by number
}

// hashes are the random multipliers of the bucket table.
type hashes [len(kernelPolicy{}.Hash)][2]uint64

const keyWords = uint64(len(hashes{}))

// newImage encodes p for the programs. The bits of sets are those of p.
func newImage(p *shaper.Policy, n numbers, h hashes, bucketLines uint32) *image {
	im := &image{sets: map[shaper.Set]uint32{}}
	k := &im.policy
	k.Hash = h
	k.BucketLines = bucketLines
	k.Paced = uint64(p.Paced())
	k.Calendars = uint64(p.Calendars())
	k.ChargeOnArrival = uint64(p.ChargedOnArrival())
	k.Blocks = uint64(p.Blocks())
	k.Shared = uint64(p.Shared())
	k.AlwaysEnforced = uint64(p.Always())
	for protocol := range k.Protocol {
		k.Protocol[protocol] = uint64(p.ProtocolSet(shaper.Protocol(protocol)))
	}
	for name, number := range n.attachments {
		k.Attachment[number] = uint64(p.OriginSet(p.AttachmentIndex(name)))
	}
	for i := range p.Len() {
		l := p.Limit(i)
		bit := uint64(1) << i
		if l.Observe {
			k.Observed |= bit
		}
		if l.CountsConnections() {
			k.Counted |= bit
		}
		k.Limit[i] = encodeLimit(p, i, n.limits[l.Name], h)
	}
	im.lines = append(im.lines, kernelLine{}) // line 0 means none
	k.Source4 = im.segments4(p.Sources4())
	k.Source6 = im.segments6(p.Sources6())
	k.Destination4 = im.segments4(asClasses(p.Destinations4()))
	k.Destination6 = im.segments6(asClasses(p.Destinations6()))
	k.Port = im.segments4(portClasses(p.Ports()))
	if k.CountryKeys = uint64(p.CountryKeys()); k.CountryKeys != 0 {
		k.Country4 = im.segments4(countryClasses(p.Countries4()))
		k.Country6 = im.segments6(countryClasses(p.Countries6()))
	}
	for d := range k.Dscp {
		k.Dscp[d] = uint64(p.DSCPSet(shaper.DSCP(d)))
	}
	for group, number := range n.cgroups {
		all, matched := p.CgroupSet(group)
		k.ByCgroup, k.Cgroup[number] = uint64(all), uint64(matched)
	}
	byMark, masks := p.Marks()
	k.ByMark, k.ByPacket, k.MarkMasks = uint64(byMark), uint64(p.ByPacket()), uint32(len(masks))
	for i := range masks {
		k.MarkMask[i].Mask, k.MarkMask[i].Values = masks[i].Mask, im.segments4(asClasses(masks[i].All()))
	}
	k.Sets = uint32(len(im.lines))
	for chunk := range slices.Chunk(im.setList, 8) {
		var l kernelLine
		for i, set := range chunk {
			l.Word[i] = uint64(set)
		}
		im.lines = append(im.lines, l)
	}
	return im
}
