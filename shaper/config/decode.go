package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// loader builds one configuration from several files.
type loader struct {
	report
	c *Config

	// What has the defaults of a table.
	newListen shaper.Listener
	newAttach shaper.Attachment
	newLimit  shaper.Limit

	newPenalty Penalty

	set          map[string]*node // positions of the keys of [daemon], [transparent] and [shared]
	asnFiles     map[string]*node // positions of ASN files, by path
	transparents []table          // [transparent] of each file
	shareds      []table          // [shared] of each file
	groups       []table          // tables of c.Groups
	named        []place          // names of groups in limits
	classes      []table          // tables of c.Classes
	classListens [][]item[string] // names of listeners in them
	reserved     []item[string]   // names of classes in limits
	listens      []table          // tables of c.Listen
	addresses    []locatedAddress
	downstreams  [][]item[shaper.Downstream] // of c.Listen
	attaches     []table                     // tables of c.Attach
	interfaces   []locatedInterface
	limits       []table                            // tables of c.Limits
	references   []references                       // names in the matches of c.Limits
	penalties    []table                            // tables of c.Penalties
	penaltyASNs  []*node                            // positions of AS numbers in them
	overrides    map[string]map[string]locatedValue // by limit and key
	ofSources    []locatedOverride                  // for some sources
	overridden   []item[string]                     // names of limits in overrides
	syntaxErrors bool                               // some file has a syntax error: names may be missing
	hasPlaces    bool                               // there are listeners or attachments, if only invalid ones
}

// references has the names of listeners and attachments in a match.
type references struct{ listen, attach []item[string] }

// locatedAddress is an address of one listener, with its position.
type locatedAddress struct {
	shaper.Address
	listen int
	at     *node
}

// file decodes one file, except its overrides.
func (l *loader) file(t table) {
	meant := t.check()
	l.hasPlaces = l.hasPlaces || meant["listen"] || meant["attach"]
	if daemon, ok := t.table("daemon"); ok {
		l.daemon(daemon)
	}
	if transparent, ok := t.table("transparent"); ok {
		l.transparent(transparent)
	}
	if shared, ok := t.table("shared"); ok {
		l.shared(shared)
	}
	if asn, ok := t.table("asn"); ok {
		l.asn(asn)
	}
	for _, group := range t.tables("group") {
		l.addGroup(group)
	}
	for _, class := range t.tables("class") {
		l.class(class)
	}
	for _, listen := range t.tables("listen") {
		l.listen(listen)
	}
	for _, attach := range t.tables("attach") {
		l.attach(attach)
	}
	for _, limit := range t.tables("limit") {
		l.limit(limit)
	}
	for _, penalty := range t.tables("penalty") {
		l.penalty(penalty)
	}
}

// checkDuplicateKeys reports keys of t that an earlier file has set.
func (l *loader) checkDuplicateKeys(t table) {
	for key := range t.values {
		name := t.name + key
		if first := l.set[name]; first != nil {
			t.errorf(key, "duplicate key, already set at %s:%d: a key of %s may be in one file only", first.file.name, first.line(), t.name)
		}
		l.set[name] = t.at.child(key)
	}
}

func (l *loader) daemon(t table) {
	l.checkDuplicateKeys(t)
	t.decode(l.c)
}

func (l *loader) transparent(t table) {
	l.checkDuplicateKeys(t)
	t.decode(l.c)
	if mark := l.c.Transparent.Mark; mark >= 253 && mark <= 255 {
		t.errorf("mark", "%d is reserved: 253 to 255 are routing tables of the system", mark)
	}
	l.transparents = append(l.transparents, t)
}

func (l *loader) asn(t table) {
	for _, f := range list(t, "files", notEmpty) {
		path := t.path(f.value)
		if first := l.asnFiles[path]; first != nil {
			l.add(f.at, fmt.Sprintf("files: duplicate %s, already named at %s:%d", quote(f.value), first.file.name, first.line()))
			continue
		}
		l.asnFiles[path] = f.at
		l.c.ASN.Files = append(l.c.ASN.Files, path)
		l.c.asnAt = append(l.c.asnAt, f.at)
	}
}

// path returns the path of a file that t names: a relative one is relative to the file of t.
func (t table) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(filepath.Dir(t.at.file.name), name)
}

func notEmpty(s string) (string, error) {
	if s == "" || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("%s is not a valid file name", quote(s))
	}
	return s, nil
}

// parseName parses the name of a listener, an attachment or a limit.
func parseName(s string, _ any) (any, error) {
	if s == "none" {
		return s, errors.New("\"none\" is reserved: logs and metrics use it where no limit applies")
	}
	return parseLabel(s, nil)
}

// parseLabel parses a name that may also be "none".
func parseLabel(s string, _ any) (any, error) {
	if !isName(s) {
		return s, fmt.Errorf("must be 1 to 64 letters, digits, \"-\", \"_\" and \".\", and begin with a letter or digit, not %s", quote(s))
	}
	return s, nil
}

// isName reports whether s is fit for metric labels, logs, paths and command lines.
func isName(s string) bool {
	return s != "" && strings.IndexByte("-_.", s[0]) < 0 && len(s) <= 64 && strings.Trim(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz0123456789-_.") == ""
}

func (l *loader) listen(t table) {
	listen := l.newListen
	elems := t.decode(&listen)
	if !t.has("check") {
		listen.Check = shaper.HealthCheck{}
	}
	switch {
	case !t.has("breaker"):
		listen.Breaker = shaper.Breaker{}
	case t.has("eject"):
		t.errorf("eject", "has no effect with a breaker, which keeps connections from a failing downstream as well: remove one of them")
	default:
		listen.EjectAfter = 0
		if len(listen.Breaker.Of) == 0 {
			listen.Breaker.Of = []shaper.Failure{shaper.FailedDial}
		}
	}
	addresses := located(listen.Addresses, elems["address"])
	for _, a := range addresses {
		l.addresses = append(l.addresses, locatedAddress{a.value, len(l.c.Listen), a.at})
	}
	downstreams := located(listen.Downstream, elems["downstream"])
	for _, d := range downstreams {
		checkDownstreamPort(t, addresses, d)
	}
	l.downstreams = append(l.downstreams, downstreams)
	t.checkNeeds(&listen)
	l.c.Listen = append(l.c.Listen, listen)
	l.listens = append(l.listens, t)
}

// checkDownstreamPort reports a port that no address uses.
func checkDownstreamPort(t table, addresses []item[shaper.Address], d item[shaper.Downstream]) {
	if d.value.Port != 0 && len(addresses) > 0 && !slices.ContainsFunc(addresses, func(a item[shaper.Address]) bool { return a.value.Single() }) {
		t.add(d.at, fmt.Sprintf("downstream: %q has a port, and a range of ports maps to the same ports: write %q",
			d.value, shaper.Downstream{Host: d.value.Host}))
	}
}

func (l *loader) addGroup(t table) {
	var g Group
	t.decode(&g)
	if g.File != "" {
		g.File = t.path(g.File)
	}
	l.c.Groups = append(l.c.Groups, g)
	l.c.groupAt = append(l.c.groupAt, t.at)
	l.groups = append(l.groups, t)
}

func (l *loader) limit(t table) {
	t = l.withOverrides(t)
	limit := l.newLimit
	elems := t.decode(&limit)
	switch shed := t.at.child("shed"); {
	case !t.has("shed"):
		limit.Shed = shaper.Shed{}
	case !limit.Shed.Any() && noSignal(t.values["shed"]):
		t.add(shed, "shed: set cpu, memory, pressure, late, descriptors or limit")
	}
	if limit.Name == BlockedName || limit.Name == BlockedPacketsName {
		t.errorf("name", "%s is reserved for \"shaperd block\"", quote(limit.Name))
	}
	checkEffect(t, &limit)
	checkTurns(t, &limit)
	l.reserve(t, &limit)
	l.tiers(t, &limit)
	l.checkTiers(t, &limit)
	if limit.ValuesFile != "" {
		limit.ValuesFile = t.path(limit.ValuesFile)
	}
	for key, names := range map[string][]string{"match.group": limit.Match.Group, "except.group": limit.Except.Group} {
		for _, name := range located(names, elems[key]) {
			l.named = append(l.named, place{len(l.c.Limits), "group", name})
		}
	}
	l.c.Limits = append(l.c.Limits, limit)
	l.c.limitAt = append(l.c.limitAt, t.at)
	l.limits = append(l.limits, t)
	l.references = append(l.references, references{
		listen: located(limit.Match.Listen, elems["match.listen"]),
		attach: located(limit.Match.Attach, elems["match.attach"]),
	})
}

// noSignal reports whether the table shed has nothing to look at, not even with a mistake.
func noSignal(shed any) bool {
	keys, isTable := shed.(map[string]any)
	for key := range keys {
		if key != "order" && key != "above" {
			return false
		}
	}
	return isTable && keys["above"] == nil // whose mistake is reported
}

func identity(s string) (string, error) { return s, nil }

// parseASN parses an AS number, "64500" or "AS64500".
func parseASN(s string) (uint32, error) {
	number := s
	if len(s) > 2 && strings.EqualFold(s[:2], "AS") {
		number = s[2:]
	}
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%s is not an AS number from 1 to 4294967295, such as 64500 or \"AS64500\"", quote(s))
	}
	return uint32(n), nil
}

// keyAttribute is one attribute of a key.
type keyAttribute struct {
	field shaper.Fields
	tlv   uint8 // with KeyTLV
}

func (a keyAttribute) String() string {
	if a.field == shaper.KeyTLV {
		return shaper.TLVName(a.tlv)
	}
	return a.field.String()
}

const tlvExample = "tlv:0xE0"

// keyNames are the names of attributes, apart from those of TLVs.
var keyNames = slices.DeleteFunc(slices.Clone(shaper.FieldNames()), func(name string) bool { return name == shaper.KeyTLV.String() })

// parseField parses one attribute of a key.
func parseField(s string) (keyAttribute, error) {
	if number, ok := strings.CutPrefix(s, "tlv:"); ok || s == "tlv" {
		n, err := strconv.ParseUint(number, 0, 8)
		if err != nil || n == 0 {
			return keyAttribute{}, fmt.Errorf("%s: write the type of the TLV, 0x01 to 0xff, such as %q", quote(s), tlvExample)
		}
		return keyAttribute{shaper.KeyTLV, uint8(n)}, nil
	}
	if s == "all" {
		return keyAttribute{}, errors.New(`"all" is unsupported: use [] for one bucket for all`)
	}
	i := slices.Index(shaper.FieldNames(), s)
	if i < 0 {
		return keyAttribute{}, errors.New(unknownValue(s, slices.Concat(keyNames, []string{tlvExample}), valueSynonyms["key"]))
	}
	return keyAttribute{field: 1 << i}, nil
}

// parseConnectionFrequency parses a frequency without the unit of packets.
func parseConnectionFrequency(s string) (shaper.Frequency, error) {
	if number, ok := strings.CutSuffix(s, "pps"); ok {
		return shaper.Frequency{}, fmt.Errorf("%s counts packets: write %q", quote(s), strings.TrimSuffix(number, " ")+"/s")
	}
	return ParseFrequency(s)
}
