package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/convert"
)

// maxConverted is the largest file that is converted, in bytes.
const maxConverted = 1 << 20

// errNothingConverted reports that no part of a file has a counterpart.
var errNothingConverted = errors.New("nothing can be converted")

func convertCommand(e env) *cobra.Command {
	var device string
	programs := []string{"haproxy", "nginx", "iptables"}
	cmd := &cobra.Command{
		Use:   "convert haproxy|nginx|iptables FILE",
		Short: "Translate limits of HAProxy, nginx or iptables to a configuration",
		Long: `Translate the limits of another program to a configuration, and print it. Supported are
the proxies of HAProxy with "mode tcp", the block "stream" of nginx, and the rules of
iptables with hashlimit or connlimit, as iptables-save prints them. If FILE is "-", read
standard input.

Comments name the line of FILE for each line of the output. Lines without a counterpart
are omitted, and listed with the reason on standard error and in comments. Nothing is
guessed.

Rules of iptables become limits at attachments, because the host only forwards the
packets. Proxies of HAProxy and nginx become listeners. Exits with 1 if nothing can be
converted.`,
		Example: `  shaperd convert haproxy /etc/haproxy/haproxy.cfg > shaperd.toml
  iptables-save | shaperd convert iptables --interface eth0 - > shaperd.toml`,
		Args: wantArgs("haproxy|nginx|iptables", "FILE"),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return programs, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
		RunE: func(_ *cobra.Command, args []string) error {
			program, file := args[0], args[1]
			switch {
			case !slices.Contains(programs, program):
				return usageError{fmt.Errorf("unsupported program %q: use haproxy, nginx or iptables", program)}
			case device != "" && program != "iptables":
				return usageError{errors.New("--interface is for iptables")}
			}
			text, err := e.readConverted(file)
			if err != nil {
				return err
			}
			var r convert.Result
			switch program {
			case "haproxy":
				r, err = convert.HAProxy(file, text)
			case "nginx":
				r, err = convert.Nginx(file, text)
			case "iptables":
				r, err = convert.Iptables(file, text, device)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			for _, o := range r.LeftOut {
				fmt.Fprintf(e.stderr, "%s: left out: %s\n", file, o)
			}
			if r.TOML == "" {
				return fmt.Errorf("%s: %w", file, errNothingConverted)
			}
			_, err = io.WriteString(e.stdout, r.TOML)
			return err
		},
	}
	cmd.Flags().StringVar(&device, "interface", "", "with iptables: `interface` for rules without -i and -o")
	return cmd
}

// readConverted reads a file, or standard input for "-".
func (e env) readConverted(file string) (string, error) {
	in := e.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	if in == nil {
		return "", errors.New("no standard input")
	}
	text, err := io.ReadAll(io.LimitReader(in, maxConverted+1))
	if err == nil && len(text) > maxConverted {
		err = fmt.Errorf("%s: larger than %d MiB", file, maxConverted>>20)
	}
	return string(text), err
}
