//! Labels of sandboxes: how many and how long, and which of them are ours.

use torpor_protocol::hosting::INSTANCE_LABELS;
use torpor_protocol::spec::Pairs;

use super::{Inadmissible, clip, invalid};

/// Labels of one sandbox, and the bytes of each name and value: enough to sort by, no database.
const LABELS_MAX: usize = 64;
const LABEL_BYTES_MAX: usize = 256;

pub(crate) fn check_labels(labels: &Pairs) -> Result<(), Inadmissible> {
    if labels.len() > LABELS_MAX {
        return invalid("labels", format!("there are {}, {LABELS_MAX} are allowed", labels.len()));
    }
    for (name, value) in labels {
        if name.is_empty() || name.contains('=') || name.chars().any(char::is_control) {
            return invalid("labels", format!("{:?} is no name of a label", clip(name)));
        }
        if name.len() > LABEL_BYTES_MAX || value.len() > LABEL_BYTES_MAX {
            let why = format!("{:?} is longer than {LABEL_BYTES_MAX} bytes", clip(name));
            return invalid("labels", why);
        }
    }
    Ok(())
}

/// What says that a sandbox is an instance of a service stays as it is.
pub(super) fn check_not_ours(labels: &Pairs, has: &Pairs) -> Result<(), Inadmissible> {
    match INSTANCE_LABELS.iter().find(|name| labels.get(**name) != has.get(**name)) {
        None => Ok(()),
        Some(name) => {
            let why = "says that a sandbox is an instance of a service: nobody else writes it";
            invalid("labels", format!("{name} {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Pairs {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn labels_of_instances_are_given_by_nobody_and_stay_as_they_are() {
        let labels = pairs(&[("a", "b"), ("torpor.revision", "1")]);
        let error = check_not_ours(&labels, &Pairs::new()).unwrap_err().to_string();
        assert!(error.starts_with("labels: torpor.revision"), "{error}");
        check_not_ours(&labels, &labels).unwrap();
        check_not_ours(&pairs(&[("torpor.revision", "1")]), &labels).unwrap();
        check_not_ours(&pairs(&[("torpor.revision", "2")]), &labels).unwrap_err();
        check_not_ours(&Pairs::new(), &labels).unwrap_err();
    }
}
