//! Closed lists whose entries have names.

/// Names of the variants of a closed list, as they are on the wire and in the ledger.
macro_rules! named {
    ($type:ident { $($variant:ident = $text:literal),* $(,)? }) => {
        impl $type {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    other => Err(format!(
                        "{other:.40} is none of {}",
                        [$($text),*].join(", ")
                    )),
                }
            }
        }
    };
}

pub(crate) use named;
