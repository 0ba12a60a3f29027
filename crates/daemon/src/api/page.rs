//! Pages of lists, cut the same way for every list. A cursor is the key of the last entry of the page
//! before: entries that come and go meanwhile neither shift the rest nor repeat any of it.

use serde::Deserialize;
use torpor_protocol::page::{PAGE_MAX, Page};
use torpor_web::error::{ApiError, Result};
use utoipa::IntoParams;

/// For lists that are asked for nothing else.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PageQuery {
    /// 1 to 1000; default 1000.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// Which part of a list is asked for.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) limit: usize,
    pub(super) cursor: Option<String>,
}

impl Cut {
    pub(super) fn new(limit: Option<usize>, cursor: Option<String>) -> Result<Self> {
        let limit = limit.unwrap_or(PAGE_MAX);
        if !(1..=PAGE_MAX).contains(&limit) {
            return Err(ApiError::invalid(format!("limit is from 1 to {PAGE_MAX}")));
        }
        Ok(Self { limit, cursor })
    }

    /// What the cursor says, to a list whose store cuts it.
    pub(super) fn parsed<T: std::str::FromStr>(&self) -> Result<Option<T>> {
        let parsed = self.cursor.as_deref().map(str::parse).transpose();
        parsed.map_err(|_| ApiError::invalid("cursor is not one that was given out"))
    }

    /// The same of a cursor that is [`dated`].
    pub(super) fn parsed_date<T: std::str::FromStr>(&self) -> Result<Option<(u64, T)>> {
        let Some(cursor) = &self.cursor else { return Ok(None) };
        let parts = cursor.split_once('-');
        let parsed = parts.and_then(|(at_ms, id)| Some((at_ms.parse().ok()?, id.parse().ok()?)));
        parsed.map(Some).ok_or_else(|| ApiError::invalid("cursor is not one that was given out"))
    }

    /// Of all there are, in the order of the keys, which differ.
    pub(super) fn of<T, P: Page<Entry = T>>(
        &self,
        mut all: Vec<T>,
        key: impl Fn(&T) -> String,
    ) -> P {
        all.retain(|entry| self.cursor.as_ref().is_none_or(|cursor| key(entry) > *cursor));
        all.sort_by_cached_key(&key);
        self.page(all, key)
    }

    /// Of what a store has read: after the cursor, in its order, and one more than the limit if there
    /// are more.
    pub(super) fn page<T, P: Page<Entry = T>>(
        &self,
        mut rows: Vec<T>,
        key: impl Fn(&T) -> String,
    ) -> P {
        let more = rows.len() > self.limit;
        rows.truncate(self.limit);
        let next = rows.last().filter(|_| more).map(key);
        P::new(rows, next)
    }

    /// How many a store is asked for.
    pub(super) fn rows(&self) -> usize {
        self.limit + 1
    }
}

impl TryFrom<PageQuery> for Cut {
    type Error = ApiError;
    fn try_from(query: PageQuery) -> Result<Self> {
        Self::new(query.limit, query.cursor)
    }
}

/// A key that sorts by time, and by id where times are the same.
pub(super) fn dated(at_ms: u64, id: &impl std::fmt::Display) -> String {
    format!("{at_ms:013}-{id}")
}

#[cfg(test)]
mod tests {
    use torpor_protocol::SecretName;
    use torpor_protocol::api::{Secret, SecretList};

    use super::*;

    fn secret(name: &str) -> Secret {
        let name: SecretName = name.parse().unwrap();
        Secret { name, version: 1, hosts: Vec::new(), created_at_ms: 0, updated_at_ms: 0 }
    }

    fn page(names: &[&str], limit: usize, cursor: Option<&str>) -> (Vec<String>, Option<String>) {
        let cut = Cut::new(Some(limit), cursor.map(str::to_owned)).unwrap();
        let all = names.iter().map(|name| secret(name)).collect();
        let page: SecretList = cut.of(all, |secret| secret.name.to_string());
        (page.secrets.iter().map(|secret| secret.name.to_string()).collect(), page.next_cursor)
    }

    #[test]
    fn pages_go_on_where_the_last_one_ended_whatever_came_and_went() {
        let (first, cursor) = page(&["A", "C", "E"], 2, None);
        assert_eq!((first, cursor.as_deref()), (vec!["A".into(), "C".into()], Some("C")));
        assert_eq!(page(&["A", "B", "D", "E"], 2, Some("C")), (vec!["D".into(), "E".into()], None));
        assert_eq!(page(&["A"], 2, Some("C")), (vec![], None));
    }

    #[test]
    fn a_page_has_one_entry_at_least_and_a_thousand_at_most() {
        assert!(Cut::new(Some(0), None).is_err() && Cut::new(Some(1001), None).is_err());
        assert_eq!(Cut::new(None, None).unwrap().limit, 1000);
    }
}
