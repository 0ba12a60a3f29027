//! What a look at the name servers means for a domain. Pure.

use torpor_protocol::domain::DomainState;
use torpor_store::DomainRow;

use super::{DAY_MS, PATIENCE_MS, PROBLEM_MAX};

/// What a look found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Look {
    Proof,
    /// There is an answer, and it is not the proof.
    Other {
        name: String,
        expected: String,
        found: Vec<String>,
    },
    /// There is no answer.
    Nothing(String),
}

impl Look {
    /// For people: exactly what is there.
    fn problem(&self) -> Option<String> {
        let text = match self {
            Self::Proof => return None,
            Self::Other { name, expected, found } if found.is_empty() => {
                format!("there is no TXT record {name}; it must be {expected:?}")
            }
            Self::Other { name, expected, found } => {
                let shown: Vec<_> = found.iter().map(|text| format!("{text:?}")).collect();
                format!("the TXT record {name} is {}; it must be {expected:?}", shown.join(" and "))
            }
            Self::Nothing(why) => why.clone(),
        };
        Some(text.chars().take(PROBLEM_MAX).collect())
    }
}

/// The domain after a look.
pub(super) fn judge(mut row: DomainRow, look: Look, now_ms: u64) -> DomainRow {
    row.problem = look.problem();
    row.checked_at_ms = Some(now_ms);
    if look == Look::Proof {
        row.proven_at_ms = Some(now_ms);
        row.state = DomainState::Verified;
        return row;
    }
    row.state = match row.state {
        DomainState::Pending => DomainState::Pending,
        DomainState::Failed => DomainState::Failed,
        DomainState::Verified => {
            // A clock that was set back makes no proof older.
            let age_ms = now_ms.saturating_sub(row.proven_at_ms.unwrap_or(0));
            if age_ms < PATIENCE_MS { DomainState::Verified } else { DomainState::Failed }
        }
    };
    row
}

/// Whether it is time to look again. Whoever adds a domain says when it is to be looked at first.
pub(super) fn is_due(row: &DomainRow, now_ms: u64) -> bool {
    let checked = row.checked_at_ms.unwrap_or(0);
    match row.state {
        DomainState::Pending => false,
        // One that was looked at in the future was so by a clock that was wrong.
        DomainState::Verified | DomainState::Failed => {
            checked > now_ms || now_ms - checked >= DAY_MS
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_protocol::PreviewId;

    const START: u64 = 1_700_000_000_000;

    fn row() -> DomainRow {
        DomainRow {
            name: "app.example.org".parse().unwrap(),
            preview: PreviewId::random(),
            state: DomainState::Pending,
            secret: "s3cret".to_owned(),
            problem: None,
            checked_at_ms: None,
            proven_at_ms: None,
            created_at_ms: START,
        }
    }

    fn other(found: &[&str]) -> Look {
        Look::Other {
            name: "_torpor.app.example.org".to_owned(),
            expected: "torpor-verify=s3cret".to_owned(),
            found: found.iter().map(|text| (*text).to_owned()).collect(),
        }
    }

    #[test]
    fn a_wrong_record_is_quoted_and_proves_nothing() {
        let after = judge(row(), other(&["torpor-verify=other", "v=spf1"]), START);
        assert_eq!(after.state, DomainState::Pending);
        let problem = after.problem.unwrap();
        for part in ["\"torpor-verify=other\"", "\"v=spf1\"", "must be \"torpor-verify=s3cret\""] {
            assert!(problem.contains(part), "{problem}");
        }
        let problem = judge(row(), other(&[]), START).problem.unwrap();
        assert!(problem.starts_with("there is no TXT record _torpor.app.example.org"), "{problem}");
    }

    #[test]
    fn a_verified_domain_survives_a_week_without_proof_and_no_longer() {
        let proven = judge(row(), Look::Proof, START);
        assert_eq!((proven.state, proven.proven_at_ms), (DomainState::Verified, Some(START)));
        let silent = || Look::Nothing("nobody answers".to_owned());
        let almost = judge(proven.clone(), silent(), START + PATIENCE_MS - 1);
        assert_eq!(almost.state, DomainState::Verified);
        assert_eq!(almost.problem.as_deref(), Some("nobody answers"));
        assert_eq!(almost.proven_at_ms, Some(START));
        let late = judge(almost, silent(), START + PATIENCE_MS);
        assert_eq!(late.state, DomainState::Failed);
        let back = judge(late, Look::Proof, START + PATIENCE_MS + 1);
        assert_eq!((back.state, back.problem), (DomainState::Verified, None));
    }

    #[test]
    fn a_clock_that_is_set_back_fails_nobody_and_stops_no_look() {
        let proven = judge(row(), Look::Proof, START);
        let after = judge(proven.clone(), other(&[]), START - 30 * DAY_MS);
        assert_eq!(after.state, DomainState::Verified);
        assert!(is_due(&proven, START - 30 * DAY_MS));
    }

    #[test]
    fn a_proof_is_looked_at_once_a_day() {
        assert!(!is_due(&row(), START + 100 * DAY_MS));
        let proven = judge(row(), Look::Proof, START);
        assert!(!is_due(&proven, START + DAY_MS - 1));
        assert!(is_due(&proven, START + DAY_MS));
    }

    #[test]
    fn a_flood_of_records_is_not_kept() {
        let long = "x".repeat(5000);
        let after = judge(row(), other(&[&long, &long]), START);
        assert!(after.problem.unwrap().chars().count() <= PROBLEM_MAX);
    }
}
