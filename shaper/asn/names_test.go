package asn

import (
	"strings"
	"testing"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

func TestNames(t *testing.T) {
	long := strings.Repeat("é", maxName/2)
	for _, tt := range []struct{ name, columns, want string }{
		{"no column", "", ""},
		{"empty", ",", ""},
		{"empty in quotes", ",\"\"", ""},
		{"plain", ",Example", "Example"},
		{"blanks around", ", Example AS ", "Example AS"},
		{"in quotes", ",\"Example, Inc.\"", "Example, Inc."},
		{"quotes in quotes", ",\"\"\"E\"\" x\"\"\"", "\"E\" x\""},
		{"quote not closed", ",\"Example, Inc.", "Example, Inc."},
		{"more columns", ",Example,x,y", "Example"},
		{"more columns after quotes", ",\"Example\",x", "Example"},
		{"country", ",ZZ,\"Example, Inc.\"", "Example, Inc."},
		{"country in quotes", ",\"ZZ\",Example,x", "Example"},
		{"two letters only", ",HP", "HP"},
		{"two small letters", ",ab,x", "ab"},
		{"tabs", "\tExample AS, Inc.", "Example AS, Inc."},
		{"tabs and a country", "\tZZ\tEXAMPLE - Example, Inc.", "EXAMPLE - Example, Inc."},
		{"spaces", " Example AS", "Example AS"},
		{"maximum length", "," + long, long},
		{"too long", "," + long + "x", long},
		{"cut at a rune", ",x" + long, "x" + long[2:]},
		{"long ASCII", "," + strings.Repeat("x", maxName+1), strings.Repeat("x", maxName)},
		{"not UTF-8", ",a\xffb\xc3", "a\ufffdb\ufffd"},
		{"control characters", ",a\x7f[2Jb\u009b\u0085\u202e", "a\ufffd[2Jb\ufffd\ufffd\ufffd"},
		{"other scripts", ",ООО \"Пример\" 例", "ООО \"Пример\" 例"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			line := "192.0.2.0,192.0.2.255,64500"
			if tt.columns != "" {
				line = strings.ReplaceAll(line, ",", tt.columns[:1])
			}
			table, err := parseAll([]byte(line + tt.columns + "\n"))
			if err != nil {
				t.Fatal(err)
			}
			if got := table.Name(64500); got != tt.want {
				t.Errorf("name is %q, want %q", got, tt.want)
			}
			checkTable(t, table)
		})
	}
}

// Of several names the first one that is not empty is used.
func TestName_FirstWins(t *testing.T) {
	named := func(n uint32, name mmdbtype.DataType) mmdbtype.DataType {
		return mmdbtype.Map{"autonomous_system_number": mmdbtype.Uint32(n), "autonomous_system_organization": name}
	}
	db := writeMMDB(t, mmdbwriter.Options{}, []network{
		{"10.0.0.0/24", named(1, mmdbtype.String("of MMDB"))},
		{"10.0.1.0/24", named(2, mmdbtype.String("two\nlines"))},
		{"10.0.2.0/24", named(3, mmdbtype.Uint32(3))},
		{"10.0.3.0/24", named(0, mmdbtype.String("none"))},
		{"10.0.4.0/24", named(4294967295, mmdbtype.String("last"))},
	})
	text := "10.1.0.0,10.1.0.255,1,\n10.1.1.0,10.1.1.255,1,of text\n10.1.2.0,10.1.2.255,1,again\n10.1.3.0,10.1.3.255,0,Not routed\n"
	table, err := parseAll([]byte(text), db)
	if err != nil {
		t.Fatal(err)
	}
	for asn, want := range map[uint32]string{0: "", 1: "of text", 2: "two\ufffdlines", 3: "", 4: "", 4294967295: "last"} {
		if got := table.Name(asn); got != want {
			t.Errorf("AS%d is named %q, want %q", asn, got, want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { table.Name(1) }); n > 0 {
		t.Errorf("Name allocates %v times", n)
	}
}
