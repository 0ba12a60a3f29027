//! Which revision answers a request.
//!
//! The newest revision has the lowest numbers of a hundred: who was on it while it had 5 percent is on it with 20,
//! too. What decides is a hash, so it is the same on every node and after every start.

use std::collections::HashSet;

use sha2::{Digest, Sha256};
use torpor_protocol::hosting::{MAIN_PREVIEW, RevisionRef, Share, TrafficTarget};
use torpor_protocol::{Name, ServiceId};
use torpor_store::ServiceRow;

use crate::error::{Error, Result};

/// Parts of one service's traffic: more revisions than anybody compares.
const SHARES_MAX: usize = 20;
/// Longest value that is hashed: a session cookie, not a body.
const VALUE_MAX: usize = 4096;

/// A number below a hundred, always the same of the same value.
pub(super) fn point(service: &ServiceId, value: &str) -> u8 {
    let mut end = value.len().min(VALUE_MAX);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    let hash = Sha256::new().chain_update(service.as_str()).chain_update([0]);
    let hash = hash.chain_update(&value[..end]).finalize();
    let first: [u8; 8] = hash[..8].try_into().expect("a hash has 32 bytes");
    u8::try_from(u64::from_be_bytes(first) % 100).unwrap_or_default()
}

/// One of these that nobody can foresee.
pub(super) fn random_point() -> u8 {
    // The remainder favours some numbers by less than one in 10^17.
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the system has entropy");
    u8::try_from(u64::from_be_bytes(bytes) % 100).unwrap_or_default()
}

/// The revision that has this point.
pub(super) fn choose(traffic: &[Share], point: u8) -> Option<u32> {
    let mut below = 0u32;
    let mut shares = traffic.iter();
    let share = shares.find(|share| {
        below += u32::from(share.percent);
        u32::from(point) < below
    });
    share.map(|share| share.revision)
}

/// All of it to one revision. Tags stay.
pub(super) fn all_to(traffic: &[Share], revision: u32, tag: Option<&Name>) -> Vec<Share> {
    let mut shares: Vec<_> = traffic
        .iter()
        .filter(|share| {
            share.revision != revision && share.tag.is_some() && share.tag.as_ref() != tag
        })
        .map(|share| Share { percent: 0, ..share.clone() })
        .collect();
    let before = traffic.iter().find(|share| share.revision == revision);
    let tag = tag.or_else(|| before?.tag.as_ref()).cloned();
    shares.push(Share { revision, percent: 100, tag, urls: Vec::new() });
    sorted(shares)
}

/// Where a rollback goes: to the oldest revision of several that answer; else to the newest one before that
/// answered once. `served`: those that are ready and had traffic.
pub(super) fn back(traffic: &[Share], served: &[u32]) -> Option<u32> {
    let answering = || traffic.iter().filter(|share| share.percent > 0).map(|it| it.revision);
    let oldest = answering().min()?;
    if answering().count() > 1 {
        return Some(oldest);
    }
    served.iter().copied().filter(|number| *number < oldest).max()
}

/// The service with this traffic.
pub(super) fn given(row: ServiceRow, traffic: Vec<Share>, now_ms: u64) -> ServiceRow {
    let mut never_served = row.never_served;
    let serving = |number| traffic.iter().any(|it| it.revision == number && it.percent > 0);
    never_served.retain(|number| !serving(*number));
    ServiceRow { traffic, never_served, updated_at_ms: now_ms, ..row }
}

/// A tag for a revision; its share stays as it is.
pub(super) fn tagged(traffic: &[Share], revision: u32, tag: &Name) -> Vec<Share> {
    let mut shares = traffic.to_vec();
    shares.iter_mut().filter(|share| share.tag.as_ref() == Some(tag)).for_each(|s| s.tag = None);
    match shares.iter_mut().find(|share| share.revision == revision) {
        Some(share) => share.tag = Some(tag.clone()),
        None => {
            let tag = Some(tag.clone());
            shares.push(Share { revision, percent: 0, tag, urls: Vec::new() });
        }
    }
    shares.retain(|share| share.percent > 0 || share.tag.is_some());
    sorted(shares)
}

/// What a request asks for, if it can be: `ready` are the revisions that can answer.
pub(super) fn parse(targets: &[TrafficTarget], ready: &[u32]) -> Result<Vec<Share>> {
    if targets.len() > SHARES_MAX {
        return Err(Error::invalid(format!("traffic: at most {SHARES_MAX} parts")));
    }
    let sum: u32 = targets.iter().map(|target| u32::from(target.percent)).sum();
    if sum != 100 {
        return Err(Error::invalid(format!("traffic: the percents are {sum} together, not 100")));
    }
    let (mut revisions, mut tags) = (HashSet::new(), HashSet::new());
    let share = |target: &TrafficTarget| {
        let revision = match target.revision {
            RevisionRef::Number(number) => Some(number).filter(|number| ready.contains(number)),
            RevisionRef::Latest => ready.iter().max().copied(),
        };
        let revision = revision.ok_or_else(|| {
            Error::invalid(format!("traffic: revision {} is not ready", target.revision))
        })?;
        if !revisions.insert(revision) {
            return Err(Error::invalid(format!("traffic: revision {revision} is there twice")));
        }
        if let Some(tag) = &target.tag {
            check_tag(tag)?;
            if !tags.insert(tag.clone()) {
                return Err(Error::invalid(format!("traffic: the tag {tag} is there twice")));
            }
        }
        Ok(Share { revision, percent: target.percent, tag: target.tag.clone(), urls: Vec::new() })
    };
    let mut shares = targets.iter().map(share).collect::<Result<Vec<_>>>()?;
    shares.retain(|share| share.percent > 0 || share.tag.is_some());
    Ok(sorted(shares))
}

pub(super) fn check_tag(tag: &Name) -> Result<()> {
    if tag.as_str() == MAIN_PREVIEW {
        return Err(Error::invalid(format!("tag: {MAIN_PREVIEW} is the address of the service")));
    }
    Ok(())
}

fn sorted(mut shares: Vec<Share>) -> Vec<Share> {
    shares.sort_by_key(|share| std::cmp::Reverse(share.revision));
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(revision: RevisionRef, percent: u8, tag: Option<&str>) -> TrafficTarget {
        TrafficTarget { revision, percent, tag: tag.map(|tag| tag.parse().unwrap()) }
    }

    fn canary(percent: u8) -> Vec<Share> {
        let targets = [
            target(RevisionRef::Number(1), 100 - percent, None),
            target(RevisionRef::Latest, percent, None),
        ];
        parse(&targets, &[1, 2]).unwrap()
    }

    #[test]
    fn a_canary_gets_its_part_and_keeps_whom_it_has_when_it_grows() {
        let service = ServiceId::random();
        let on_new = |percent: u8| -> HashSet<u32> {
            let shares = canary(percent);
            let new = |user: &u32| choose(&shares, point(&service, &user.to_string())) == Some(2);
            (0..10_000).filter(new).collect()
        };
        let (few, more) = (on_new(5), on_new(20));
        assert!((380..=620).contains(&few.len()), "{}", few.len());
        assert!((1800..=2200).contains(&more.len()), "{}", more.len());
        assert!(few.is_subset(&more), "who was on the new revision stays on it");
    }

    #[test]
    fn the_same_value_is_the_same_revision_and_no_value_is_any() {
        let service: ServiceId = "svc-aaaaaaaaaaaaaaaaaaaaa".parse().unwrap();
        // On every node, in every version: changing this moves people.
        assert_eq!(["ann", "bob", ""].map(|user| point(&service, user)), POINTS);
        let drawn: HashSet<_> = (0..5000).map(|_| random_point()).collect();
        assert_eq!(drawn.len(), 100);
        point(&service, &"ü".repeat(VALUE_MAX));
    }
    const POINTS: [u8; 3] = [54, 55, 97];

    #[test]
    fn what_is_no_traffic_is_refused() {
        use RevisionRef::{Latest, Number};
        for (targets, why) in [
            (vec![target(Number(1), 99, None)], "99 together"),
            (vec![target(Number(1), 100, None), target(Number(1), 0, Some("a"))], "twice"),
            (vec![target(Number(3), 100, None)], "not ready"),
            (vec![target(Number(2), 50, None), target(Latest, 50, None)], "twice"),
            (vec![target(Latest, 100, Some("main"))], "main"),
            (vec![target(Latest, 100, Some("a")), target(Number(1), 0, Some("a"))], "tag a"),
        ] {
            let error = parse(&targets, &[1, 2]).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(parse(&[target(Latest, 100, None)], &[]).is_err());
    }

    #[test]
    fn a_rollback_ends_a_canary_and_else_goes_to_what_answered_before() {
        let served = [1, 2, 3, 4];
        let [one, four] = [3, 4].map(|number| all_to(&[], number, None));
        let share = |revision, percent| Share { revision, percent, tag: None, urls: Vec::new() };
        assert_eq!(back(&[share(4, 20), share(3, 80)], &served), Some(3));
        assert_eq!(back(&[share(4, 20), share(3, 80), share(1, 0)], &[4]), Some(3));
        assert_eq!(back(&one, &served), Some(2));
        assert_eq!(back(&four, &[1, 4]), Some(1), "what never answered is passed over");
        assert_eq!((back(&four, &[4, 5]), back(&[], &served)), (None, None));
    }

    #[test]
    fn a_switch_moves_all_at_once_and_leaves_the_tags() {
        let tag: Name = "next".parse().unwrap();
        let shares = tagged(&canary(20), 2, &tag);
        let switched = all_to(&shares, 3, None);
        let seen: Vec<_> =
            switched.iter().map(|s| (s.revision, s.percent, s.tag.is_some())).collect();
        assert_eq!(seen, [(3, 100, false), (2, 0, true)]);
        let back = all_to(&switched, 2, None);
        assert_eq!(back.len(), 1);
        assert_eq!((back[0].percent, back[0].tag.as_ref()), (100, Some(&tag)));
        for n in 0..100 {
            assert_eq!(choose(&back, n), Some(2));
        }
        assert_eq!(choose(&[], 0), None);
        let moved = all_to(&back, 4, Some(&tag));
        assert_eq!(moved.len(), 1, "the tag is the new revision's");
    }
}
