//! Entry point of a fuzz target: what holds whatever a name server answers.

use super::{Message, TEXT_MAX, TEXTS_MAX, answers, question, read};
use crate::input;

/// Texts are few and short.
pub fn domain_dns(bytes: &[u8]) {
    let Ok(message) = Message::from_vec(bytes) else { return };
    let asked = question("_torpor.example.com").expect("it is a name");
    let _ = answers(&message, message.metadata.id, &asked);
    let Ok(texts) = read(&message, asked.name()) else { return };
    assert!(texts.len() <= TEXTS_MAX, "{} texts", texts.len());
    // What is not UTF-8 becomes three bytes.
    assert!(texts.iter().all(|text| text.len() <= 3 * TEXT_MAX), "they are short");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_domain_dns() {
        input::replay("domain_dns", domain_dns);
    }
}
