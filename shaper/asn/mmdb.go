package asn

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strconv"

	"github.com/oschwald/maxminddb-golang/v2"

	"shaperd.dev/shaperd/shaper/segments"
)

const (
	mmdbMarker = "\xab\xcd\xefMaxMind.com"
	// mmdbSeparator is the length of the zeros between search tree and data, in bytes.
	mmdbSeparator = 16
)

// readMMDB reads a binary file.
func (b *builder) readMMDB(br *bufio.Reader, name string) error {
	data, err := io.ReadAll(br)
	if err != nil {
		return fmt.Errorf("%s: read file: %w", name, readError(err))
	}
	marker := bytes.LastIndex(data, []byte(mmdbMarker))
	if marker < 0 {
		return binaryError(name, data)
	}
	w, err := newTreeWalk(data, marker)
	if err != nil {
		return fmt.Errorf("%s: open MMDB: %w; the file is truncated or corrupt", name, err)
	}
	w.b, w.src = b, source{file: uint16(len(b.files) - 1)}
	if err := w.walk(0, segments.Addr6{}, w.root); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if len(w.records) > 0 && !w.found {
		return fmt.Errorf("%s: MMDB of type %s has records without autonomous_system_number or asn; expected an ASN database",
			name, quote(w.db.Metadata.DatabaseType))
	}
	return nil
}

// treeWalk visits the networks of an MMDB (the MaxMind DB file format, 2.0).
// The library decodes the records; its own iterator is not used, as it follows
// shared branches without a bound: 128 nodes can form 2^128 networks.
//
// An IPv4 tree is walked as the subtree of an IPv6 tree that it corresponds to, ::/96.
type treeWalk struct {
	db       *maxminddb.Reader
	tree     []byte
	nodes    uint64 // in the tree
	nodeSize uint64 // in bytes
	dataSize uint64 // in bytes
	root     int    // depth of node 0: 96 for IPv4, 0 for IPv6
	v4Root   uint64 // record of ::/96; IPv6 only
	steps    uint64 // nodes visited
	maxSteps uint64

	records map[uint64]mmdbRecord // by pointer: many networks share a record
	found   bool                  // some record has an ASN field or a country

	b   *builder
	src source
}

// newTreeWalk checks that the tree and the data fit the metadata.
func newTreeWalk(data []byte, marker int) (*treeWalk, error) {
	db, err := maxminddb.OpenBytes(data)
	if err != nil {
		return nil, libraryError(err)
	}
	m := db.Metadata
	w := &treeWalk{db: db, nodes: uint64(m.NodeCount), nodeSize: uint64(m.RecordSize) / 4, records: map[uint64]mmdbRecord{}}
	switch m.RecordSize {
	case 24, 28, 32:
	default:
		return nil, fmt.Errorf("record size %d: expected 24, 28 or 32", m.RecordSize)
	}
	// A division, as the product may overflow.
	if uint64(marker) < mmdbSeparator || w.nodes > (uint64(marker)-mmdbSeparator)/w.nodeSize {
		return nil, fmt.Errorf("%d tree nodes do not fit in %d bytes", w.nodes, marker)
	}
	w.tree = data[:w.nodes*w.nodeSize]
	w.dataSize = uint64(marker) - mmdbSeparator - uint64(len(w.tree))
	// A node of a tree is visited once. The margin is for branches that a writer
	// shares to save space.
	w.maxSteps = min(16*w.nodes+1<<16, 1<<25)

	switch m.IPVersion {
	case 4:
		w.root = 96
	case 6:
		for range 96 {
			if w.v4Root < w.nodes {
				w.v4Root, _ = w.node(w.v4Root)
			}
		}
	default:
		return nil, fmt.Errorf("IP version %d: expected 4 or 6", m.IPVersion)
	}
	return w, nil
}

// node returns the records of a node, which must be below w.nodes.
func (w *treeWalk) node(i uint64) (left, right uint64) {
	b := w.tree[i*w.nodeSize : (i+1)*w.nodeSize]
	switch w.nodeSize {
	case 6:
		return uint64(b[0])<<16 | uint64(b[1])<<8 | uint64(b[2]),
			uint64(b[3])<<16 | uint64(b[4])<<8 | uint64(b[5])
	case 7:
		// The middle byte holds the high four bits of both.
		return uint64(b[3]>>4)<<24 | uint64(b[0])<<16 | uint64(b[1])<<8 | uint64(b[2]),
			uint64(b[3]&15)<<24 | uint64(b[4])<<16 | uint64(b[5])<<8 | uint64(b[6])
	}
	return uint64(binary.BigEndian.Uint32(b)), uint64(binary.BigEndian.Uint32(b[4:]))
}

// walk adds the networks under a record, which is that of a prefix: a, of depth bits.
func (w *treeWalk) walk(record uint64, a segments.Addr6, depth int) error {
	switch {
	case record == w.nodes:
		return nil
	case record > w.nodes:
		return w.leaf(record, a, depth)
	case w.root == 0 && depth > 0 && record == w.v4Root && (depth != 96 || a != segments.Addr6{}):
		return nil // an alias of the IPv4 subtree
	case depth == 128:
		return fmt.Errorf("search tree is deeper than an address at %s; the file is corrupt", a.Addr())
	case w.steps == w.maxSteps:
		return fmt.Errorf("search tree of %d nodes takes over %d steps; the file is corrupt", w.nodes, w.maxSteps)
	}
	w.steps++
	left, right := w.node(record)
	if err := w.walk(left, a, depth+1); err != nil {
		return err
	}
	if depth < 64 {
		a.Hi |= 1 << (63 - depth)
	} else {
		a.Lo |= 1 << (127 - depth)
	}
	return w.walk(right, a, depth+1)
}

// leaf adds one network.
func (w *treeWalk) leaf(record uint64, a segments.Addr6, depth int) error {
	inV4 := a.Hi == 0 && a.Lo>>32 == 0 // a is in ::/96
	network := netip.PrefixFrom(a.Addr(), depth)
	if inV4 && depth >= 96 {
		network = netip.PrefixFrom(segments.Addr4(a.Lo).Addr(), depth-96)
	}

	r, ok := w.records[record]
	if !ok {
		var err error
		if r, err = w.decode(record); err != nil {
			return fmt.Errorf("network %s: %w", network, err)
		}
		w.records[record] = r
	}
	w.add(network, r)
	if inV4 && depth < 96 {
		// A network that contains all of ::/96 applies to all of IPv4.
		w.add(netip.PrefixFrom(netip.IPv4Unspecified(), 0), r)
	}
	return nil
}

// mmdbRecord is what a record says of its networks; 0 where it says nothing.
type mmdbRecord struct {
	asn     uint32
	country Country
}

func (w *treeWalk) add(network netip.Prefix, r mmdbRecord) {
	w.b.addNetwork(network, r.asn, w.src)
	if w.b.countries != nil {
		w.b.countries.addNetwork(network, uint32(r.country), w.src)
	}
}

// decode decodes a record, and adds the name of its AS.
func (w *treeWalk) decode(record uint64) (r mmdbRecord, err error) {
	if record < w.nodes+mmdbSeparator || record-w.nodes-mmdbSeparator >= w.dataSize {
		return r, errors.New("record is outside the data; the file is corrupt")
	}
	var fields struct {
		Number any `maxminddb:"autonomous_system_number"`
		ASN    any `maxminddb:"asn"`
		Name   any `maxminddb:"autonomous_system_organization"`
	}
	var countries countryFields
	offset := uintptr(record - w.nodes - mmdbSeparator)
	if err := w.db.LookupOffset(offset).Decode(&fields); err != nil {
		return r, fmt.Errorf("decode record: %w; the file is corrupt", libraryError(err))
	}
	value := fields.Number
	if value == nil {
		value = fields.ASN
	}
	if w.b.countries != nil || value == nil {
		if err := w.db.LookupOffset(offset).Decode(&countries); err != nil {
			return r, fmt.Errorf("decode record: %w; the file is corrupt", libraryError(err))
		}
		r.country = countries.country()
	}
	w.found = w.found || value != nil || r.country != 0
	w.b.hasCountries = w.b.hasCountries || r.country != 0
	r.asn, err = numberOf(value)
	if name, ok := fields.Name.(string); ok && r.asn != 0 && !w.b.hasName(r.asn) {
		w.b.addName(r.asn, []byte(name))
	}
	return r, err
}

// numberOf converts the ASN field of a record.
func numberOf(value any) (uint32, error) {
	switch v := value.(type) {
	case nil:
		return 0, nil
	case uint64:
		if v <= math.MaxUint32 {
			return uint32(v), nil
		}
	case int32:
		if v >= 0 {
			return uint32(v), nil
		}
	case string:
		// Writers that convert a spreadsheet to a database have no other way to
		// omit a field.
		if v == "" {
			return 0, nil
		}
		return parseASN(v)
	}
	return 0, asnError(fmt.Sprint(value))
}

// libraryError returns an error as one printable line, as it may quote any bytes of
// the file.
func libraryError(err error) error {
	const longest = 200 // bytes
	msg := err.Error()
	msg = strconv.Quote(msg[:min(len(msg), longest)])
	return errors.New(msg[1 : len(msg)-1])
}
