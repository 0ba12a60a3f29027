//! "Did you mean": the name somebody may have wanted to type. Pure.

/// The candidate nearest to `wanted`, if one is near enough to be a slip of the fingers.
pub(crate) fn nearest<'a>(
    wanted: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let near = |candidate: &'a str| {
        let distance = distance(wanted, candidate);
        let part = candidate.len() > wanted.len() && candidate.starts_with(wanted);
        let slip = distance <= 1 + wanted.len() / 5 && distance < wanted.len();
        (slip || part).then_some((distance, candidate))
    };
    candidates.into_iter().filter_map(near).min().map(|(_, candidate)| candidate)
}

/// Insertions, deletions, changes and swaps of neighbours that make one text the other.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = usize::from(a[i - 1] != b[j - 1]);
            let mut best =
                (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + change);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_fingers_is_recognised() {
        let names = ["web", "worker-1", "database"];
        for (typed, meant) in [("wbe", "web"), ("worker1", "worker-1"), ("data", "database")] {
            assert_eq!(nearest(typed, names), Some(meant), "{typed}");
        }
    }

    #[test]
    fn another_word_is_not_suggested() {
        assert_eq!(nearest("queue", ["web", "worker-1"]), None);
        assert_eq!(nearest("x", ["y"]), None);
    }
}
