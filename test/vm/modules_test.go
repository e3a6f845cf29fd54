package vm

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// modules are loaded in the guest before its tests start.
var modules = []string{
	"veth", "ifb", "dummy", "tun",
	"sch_ingress", // clsact, too
	"sch_cake", "sch_codel", "sch_fq", "sch_fq_codel", "sch_htb", "sch_netem", "sch_prio", "sch_tbf",
	"cls_bpf", "cls_flower", "cls_matchall", "cls_u32",
	"act_bpf", "act_gact", "act_mirred", "act_police", "act_skbedit",
	"tcp_bbr",
	"nf_tables", "nf_flow_table_inet",
	"nfnetlink", "xfrm_user", // netlink.Handle opens sockets of both
}

// loadOrder returns the files of the modules called names, relative to dir, each after
// its dependencies. Built-in modules have no file.
func loadOrder(dir string, names []string) ([]string, error) {
	builtin, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	dep, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	files := make(map[string]string)   // by name; "" if built in
	needs := make(map[string][]string) // dependencies by file
	for file := range strings.Lines(string(builtin)) {
		files[moduleName(strings.TrimSpace(file))] = ""
	}
	for line := range strings.Lines(string(dep)) {
		file, others, _ := strings.Cut(line, ":")
		files[moduleName(file)] = file
		needs[file] = strings.Fields(others)
	}

	var order []string
	done := map[string]bool{"": true}
	var visit func(file string)
	visit = func(file string) {
		if done[file] {
			return
		}
		done[file] = true
		for _, other := range needs[file] {
			visit(other)
		}
		order = append(order, file)
	}
	for _, name := range names {
		file, ok := files[name]
		if !ok {
			return nil, fmt.Errorf("%s has no module %s", dir, name)
		}
		visit(file)
	}
	return order, nil
}

func moduleName(file string) string {
	return strings.ReplaceAll(strings.TrimSuffix(path.Base(file), ".ko"), "-", "_")
}
