package config

import (
	"sort"
	"strings"
)

// Bounds of a file before it is parsed. No real configuration comes near them; a
// hostile file would exhaust the parser's stack (it recurses into values) or memory
// (it stores the full path of each key).
const (
	maxFile  = 4 << 20 // bytes
	maxDepth = 64      // tables and arrays inside each other
	maxPath  = 128     // bytes of the dotted path of a key
)

// file is one configuration file.
type file struct {
	name  string
	order int // index among the files
	text  string
	lines []int // offsets of line starts
}

func newFile(name string, order int, text string) *file {
	f := &file{name: name, order: order, text: strings.TrimPrefix(text, "\ufeff"), lines: []int{0}}
	for i := range len(f.text) {
		if f.text[i] == '\n' {
			f.lines = append(f.lines, i+1)
		}
	}
	return f
}

// node is the position of a key, a table or an element of an array. The nodes of a
// file are a tree in the shape of its values, because the TOML decoder does not
// return positions.
type node struct {
	file   *file
	offset int // of the key, of the header's "[", or of the element
	keys   map[string]*node
	elems  []*node

	headed   bool // the node is a table with its own header
	override bool // the node is a key of an [[override]], applied to a limit
	migrated bool // the node is a key of an earlier version, already reported
}

// child returns the node of a key, or n if there is none.
func (n *node) child(key string) *node {
	if c := n.keys[key]; c != nil {
		return c
	}
	return n
}

// elem returns the node of element i, or n if there is none.
func (n *node) elem(i int) *node {
	if i < len(n.elems) {
		return n.elems[i]
	}
	return n
}

func (n *node) line() int { return sort.SearchInts(n.file.lines, n.offset+1) }

func (n *node) error(msg string) *Error {
	line := n.line()
	return &Error{File: n.file.name, Line: line, Column: n.offset - n.file.lines[line-1] + 1, Msg: msg}
}

// scanner finds the nodes of a file. It is exact for valid TOML; in an invalid file it
// only has to be right up to the mistake, which the decoder then reports.
type scanner struct {
	file  *file
	text  string
	pos   int
	depth int // nesting depth at pos
	path  int // bytes of the dotted path at pos
	err   *mistake
}

// scan returns the root node of f, or a mistake if f exceeds the bounds.
func scan(f *file) (*node, *mistake) {
	s := &scanner{file: f, text: f.text}
	root := s.node(0)
	table := root
	for s.skip(" \t\r\n"); s.pos < len(s.text); s.skip(" \t\r\n") {
		if s.text[s.pos] != '[' {
			s.keyValue(table)
			continue
		}
		header := s.pos
		array := strings.HasPrefix(s.text[s.pos:], "[[")
		s.depth, s.path = 0, 0
		s.pos++
		if array {
			s.pos++
		}
		table = s.open(root, s.key(), header, array)
		if !s.accept(']') || array && !s.accept(']') {
			s.stop()
		}
	}
	return root, s.err
}

func (s *scanner) node(offset int) *node { return &node{file: s.file, offset: offset} }

// stop ends the scan at a mistake.
func (s *scanner) stop() { s.pos = len(s.text) }

func (s *scanner) fail(offset int, msg string) {
	if s.err == nil {
		s.err = &mistake{s.node(offset), msg}
	}
	s.stop()
}

// enter adds a table, an array or a key at offset to the current depth and path.
func (s *scanner) enter(offset, depth, path int) {
	s.depth += depth
	s.path += path
	if s.depth > maxDepth {
		s.fail(offset, "nested deeper than 64 tables and arrays")
	}
	if s.path > maxPath {
		s.fail(offset, "the key path is longer than 128 bytes")
	}
}

// skip skips the characters of set, and comments.
func (s *scanner) skip(set string) {
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case strings.IndexByte(set, c) >= 0:
			s.pos++
		case c == '#':
			s.pos += lengthUntil(s.text[s.pos:], "\n")
		default:
			return
		}
	}
}

func (s *scanner) accept(c byte) bool {
	if s.pos < len(s.text) && s.text[s.pos] == c {
		s.pos++
		return true
	}
	return false
}

type keyPart struct {
	name   string
	offset int
}

// key reads a dotted key and the space after it, and enters it. The result has at
// least one part.
func (s *scanner) key() []keyPart {
	var parts []keyPart
	for {
		s.skip(" \t")
		part := keyPart{offset: s.pos}
		if s.pos < len(s.text) && (s.text[s.pos] == '"' || s.text[s.pos] == '\'') {
			s.string()
			part.name = unquote(s.text[part.offset:s.pos])
		} else {
			s.pos += bareLength(s.text[s.pos:])
			if part.name = s.text[part.offset:s.pos]; part.name == "" {
				s.stop()
			}
		}
		parts = append(parts, part)
		s.enter(part.offset, 1, len(part.name)+1)
		s.skip(" \t")
		if !s.accept('.') {
			return parts
		}
	}
}

// bareLength is the length of the unquoted key that s starts with.
func bareLength(s string) int {
	for i := range len(s) {
		c := s[i]
		if c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-' {
			continue
		}
		return i
	}
	return len(s)
}

// unquote returns the value of a quoted key, or "" if it is malformed.
func unquote(quoted string) string {
	var v struct{ K string }
	if err := decode("K = "+quoted, &v); err != nil {
		return ""
	}
	return v.K
}

// open returns the node of the table under a header at offset.
func (s *scanner) open(root *node, path []keyPart, offset int, array bool) *node {
	n := s.walk(root, path[:len(path)-1], offset)
	last := s.at(n, path[len(path)-1].name, offset)
	if !array {
		if !last.headed { // maybe created by the header of a subtable
			last.offset, last.headed = offset, true
		}
		return last
	}
	last.elems = append(last.elems, s.node(offset))
	return last.elems[len(last.elems)-1]
}

// walk follows path, in an array of tables into its last element.
func (s *scanner) walk(n *node, path []keyPart, offset int) *node {
	for _, part := range path {
		n = s.at(n, part.name, offset)
		if len(n.elems) > 0 {
			n = n.elems[len(n.elems)-1]
		}
	}
	return n
}

// at returns the node of a key of n, and creates it at offset if necessary.
func (s *scanner) at(n *node, key string, offset int) *node {
	c := n.keys[key]
	if c == nil {
		c = s.node(offset)
		if n.keys == nil {
			n.keys = map[string]*node{}
		}
		n.keys[key] = c
	}
	return c
}

// keyValue reads "key = value" in a table.
func (s *scanner) keyValue(table *node) {
	depth, path := s.depth, s.path
	key := s.key()
	table = s.walk(table, key[:len(key)-1], key[0].offset)
	n := s.at(table, key[len(key)-1].name, key[0].offset)
	if !s.accept('=') {
		s.stop()
		return
	}
	s.value(n)
	s.depth, s.path = depth, path
}

// value reads the value of n.
func (s *scanner) value(n *node) {
	s.skip(" \t")
	if s.pos == len(s.text) {
		return
	}
	switch s.text[s.pos] {
	case '"', '\'':
		s.string()
	case '[':
		s.list(']', func() {
			elem := s.node(s.pos)
			n.elems = append(n.elems, elem)
			s.value(elem)
		})
	case '{':
		s.list('}', func() { s.keyValue(n) })
	default:
		length := lengthUntil(s.text[s.pos:], ",]}#\r\n")
		if length == 0 {
			s.stop()
		}
		s.pos += length
	}
}

// list reads items in brackets, separated by commas.
func (s *scanner) list(end byte, item func()) {
	s.enter(s.pos, 1, 0)
	s.pos = min(s.pos+1, len(s.text))
	for {
		s.skip(" \t\r\n")
		if s.accept(end) {
			break
		}
		if s.pos == len(s.text) {
			return
		}
		item()
		s.skip(" \t\r\n")
		if s.accept(end) {
			break
		}
		if !s.accept(',') {
			s.stop()
			return
		}
	}
	s.depth--
}

// string skips a string of any of the four kinds.
func (s *scanner) string() {
	text := s.text[s.pos:]
	quote, multi := text[:1], text[:1]+text[:1]+text[:1]
	if !strings.HasPrefix(text, multi) {
		s.stringUntil(quote, 1)
		return
	}
	s.stringUntil(multi, 3)
	// One or two quotes before the closing three belong to the string.
	for range 2 {
		s.accept(quote[0])
	}
}

func (s *scanner) stringUntil(end string, from int) {
	for i := s.pos + from; i < len(s.text); i++ {
		switch {
		case s.text[i] == '\\' && end[0] == '"':
			i++
		case strings.HasPrefix(s.text[i:], end):
			s.pos = i + len(end)
			return
		case s.text[i] == '\n' && from == 1:
			s.stop()
			return
		}
	}
	s.stop()
}

func lengthUntil(s, set string) int {
	if i := strings.IndexAny(s, set); i >= 0 {
		return i
	}
	return len(s)
}
