package main

import (
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func blocksCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "blocks",
		Short:       "Show the prefixes that are blocked",
		Long:        `Show the source prefixes from which nothing passes, and until when.`,
		Example:     `  shaperd blocks`,
		Annotations: withJSON,
		Args:        noArgs(`: "shaperd block PREFIX" blocks one`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			blocks, err := e.daemon().Blocks(cmd.Context())
			if err != nil {
				return err
			}
			return e.showBlocks(blocks)
		},
	}
}

func (e env) showBlocks(blocks []control.Block) error {
	return e.show(blocks, func(p *page) {
		if len(blocks) == 0 {
			p.line("Nothing is blocked.")
		}
		p.table(blocksTable(blocks, time.Now()))
	})
}

func blocksTable(blocks []control.Block, now time.Time) *table {
	t := newTable("BLOCKED", "SINCE", "UNTIL")
	for _, b := range blocks {
		t.add(b.Prefix, clock(b.Since, now), strings.TrimPrefix(until(b.Until, now, `"shaperd unblock"`), "until "))
	}
	return t
}

func blockCommand(e env) *cobra.Command {
	var forTime span
	cmd := &cobra.Command{
		Use:   "block PREFIX",
		Short: "Let nothing pass from a prefix",
		Long: `Let nothing pass from a source address or prefix: new connections and datagrams are
refused, and connections that are there are ended. It lasts for the time of --for, or
until "shaperd unblock"; reloads do not end it, nor does a restart where "run" has --state.
A prefix that is blocked for longer stays so: "shaperd unblock" it first.
It is enforced in every mode: also while the daemon observes, and during a bypass.`,
		Example: `  shaperd block 192.0.2.0/24 --for 10m
  shaperd block 2001:db8::7`,
		Annotations: asOrder,
		Args:        args("PREFIX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.daemon()
			if err := c.Block(cmd.Context(), control.SetBlock{Prefix: prefix.String(), For: forTime.seconds()}); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterOrder(err)
			}
			return e.showBlocks(blocks)
		},
	}
	forFlag(cmd, &forTime, `until "shaperd unblock"`)
	return cmd
}

func unblockCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "unblock PREFIX",
		Short:       "Take a block away",
		Long:        `Take a block away. PREFIX is as "shaperd blocks" shows it.`,
		Example:     `  shaperd unblock 192.0.2.0/24`,
		Annotations: asOrder,
		Args:        args("PREFIX"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			blocks, err := e.daemon().Blocks(cmd.Context())
			var prefixes []string
			for _, b := range blocks {
				prefixes = append(prefixes, b.Prefix)
			}
			if err != nil || len(args) > 0 {
				prefixes = nil
			}
			return prefixes, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.daemon()
			if err := c.Unblock(cmd.Context(), prefix.String()); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterOrder(err)
			}
			return e.showBlocks(blocks)
		},
	}
}

// parsePrefix reads a prefix of the command line.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := control.ParsePrefix(s)
	if err != nil {
		return p, usageError{err}
	}
	return p, nil
}
