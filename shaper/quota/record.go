package quota

import (
	"encoding/json"
	"fmt"
	"time"
)

// Record is what the file has of a budget.
type Record struct {
	Unit   Unit
	Period Period
	Start  time.Time // of the slot of Used[0]
	Used   []uint64  // by slot, the latest first; of that one what is claimed
}

// Over reports whether all that r counts is over at now.
func (r *Record) Over(now time.Time) bool {
	_, end := r.Period.slotBegun(r.Start)
	return !now.Before(end.Add(r.Period.Rolling))
}

// savedRecord is a record in the file.
type savedRecord struct {
	Unit   Unit
	Period string
	Start  int64 // Unix time in nanoseconds
	Used   []uint64
}

// MarshalJSON implements [json.Marshaler].
func (r Record) MarshalJSON() ([]byte, error) {
	return json.Marshal(savedRecord{r.Unit, r.Period.String(), r.Start.UnixNano(), r.Used})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (r *Record) UnmarshalJSON(text []byte) error {
	var s savedRecord
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	p, err := ParsePeriod(s.Period)
	if err != nil {
		return err
	}
	if len(s.Used) == 0 || len(s.Used) > 1+p.slots() {
		return fmt.Errorf("%d slots", len(s.Used))
	}
	*r = Record{s.Unit, p, time.Unix(0, s.Start), s.Used}
	return nil
}
