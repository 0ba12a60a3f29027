//! Lists come in pages: `limit` and `cursor` in the query, `next_cursor` in the body, the same for all.

/// Entries of one page: the default, and the most that `limit` can ask for.
pub const PAGE_MAX: usize = 1000;

/// A body that is a page of a list.
pub trait Page {
    type Entry;

    /// A page of these entries; with a cursor, more follow.
    fn new(entries: Vec<Self::Entry>, next_cursor: Option<String>) -> Self;

    fn into_parts(self) -> (Vec<Self::Entry>, Option<String>);
}

/// Makes the body of a list: the entries under their name, and the cursor.
macro_rules! page {
    ($(#[$doc:meta])* $list:ident { $(#[$order:meta])* $entries:ident: $entry:ident }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub struct $list {
            $(#[$order])*
            pub $entries: Vec<$entry>,
            /// Ask for `?cursor=` this to get the rest.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub next_cursor: Option<String>,
        }

        impl $crate::page::Page for $list {
            type Entry = $entry;

            fn new($entries: Vec<$entry>, next_cursor: Option<String>) -> Self {
                Self { $entries, next_cursor }
            }

            fn into_parts(self) -> (Vec<$entry>, Option<String>) {
                (self.$entries, self.next_cursor)
            }
        }
    };
}
pub(crate) use page;
