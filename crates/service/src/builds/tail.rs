//! The output of a step: whole characters to pass on, and its end for the error message.

/// Bytes of the end that are kept: a screenful.
const KEPT: usize = 2000;
/// Shorter secrets are words that output has for other reasons.
const SECRET_MIN: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Tail {
    /// The beginning of a character whose rest has not come; at most three bytes.
    begun: Vec<u8>,
    kept: String,
}

impl Tail {
    /// What can be shown now. Bytes that are no text show as U+FFFD, and secrets as stars, unless they
    /// come in pieces.
    pub(super) fn push(&mut self, bytes: &[u8], secrets: &[&str]) -> String {
        let mut whole = std::mem::take(&mut self.begun);
        whole.extend_from_slice(bytes);
        if let Err(error) = std::str::from_utf8(&whole)
            && error.error_len().is_none()
        {
            self.begun = whole.split_off(error.valid_up_to());
        }
        let mut text = String::from_utf8_lossy(&whole).into_owned();
        for secret in secrets.iter().map(|secret| secret.trim()).filter(|it| it.len() >= SECRET_MIN)
        {
            text = text.replace(secret, "***");
        }
        self.kept.push_str(&text);
        keep_end(&mut self.kept, KEPT);
        text
    }

    /// The last thing that was said.
    pub(super) fn last(&self) -> Option<&str> {
        Some(self.kept.trim()).filter(|kept| !kept.is_empty())
    }
}

/// Forgets the beginning of a text that has more than so many bytes.
pub(super) fn keep_end(text: &mut String, most: usize) {
    let mut cut = text.len().saturating_sub(most);
    while !text.is_char_boundary(cut) {
        cut += 1;
    }
    text.drain(..cut);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_stay_whole_and_the_end_is_kept() {
        let mut tail = Tail::default();
        let bytes = "ä".as_bytes();
        assert_eq!(tail.push(&bytes[..1], &[]), "");
        assert_eq!(tail.push(&bytes[1..], &[]), "ä");
        tail.push("ö".repeat(5000).as_bytes(), &[]);
        tail.push(b"the end\n", &[]);
        assert_eq!(tail.push(b"x hunter2\n", &["hunter2\n", "x"]), "x ***\n");
        tail.push(b"the end\n", &[]);
        let last = tail.last().unwrap();
        assert!(last.len() <= KEPT && last.ends_with("the end"), "{last}");
        assert_eq!(Tail::default().last(), None);
    }
}
