//! How values of the file protocol are put into bytes and taken out again.
//!
//! Numbers are little-endian. Whatever the other side sent, taking it out borrows, allocates no more than a small
//! multiple of what is there, and ends with a value or a [`BadMessage`].

use std::borrow::Cow;

use super::{DATA_MAX, HANDLE_MAX, NAME_MAX};

/// The other side does not speak this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    #[error("a message is cut off")]
    Cut,
    #[error("a message has {0} bytes too many")]
    Rest(usize),
    #[error("a message of {0} bytes is too large")]
    Size(usize),
    #[error("{0} is no kind of message, or of a part of one")]
    Kind(u8),
    #[error("that is no name of a file")]
    Name,
    #[error("that is no handle of a file")]
    Handle,
}

/// A value that has a form in bytes.
pub trait Wire<'a>: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(from: &mut &'a [u8]) -> Result<Self, BadMessage>;
}

fn split<'a>(from: &mut &'a [u8], length: usize) -> Result<&'a [u8], BadMessage> {
    let (taken, rest) = from.split_at_checked(length).ok_or(BadMessage::Cut)?;
    *from = rest;
    Ok(taken)
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Wire<'_> for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(from: &mut &[u8]) -> Result<Self, BadMessage> {
                let (taken, rest) = from.split_first_chunk().ok_or(BadMessage::Cut)?;
                let number = Self::from_le_bytes(*taken);
                *from = rest;
                Ok(number)
            }
        }
    )*};
}

numbers!(u8, u32, i32, u64, i64);

impl Wire<'_> for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(from: &mut &[u8]) -> Result<Self, BadMessage> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(BadMessage::Kind(other)),
        }
    }
}

impl<'a, T: Wire<'a>> Wire<'a> for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, BadMessage> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }
}

/// Up to its end: a list is the last part of a message.
impl<'a, T: Wire<'a>> Wire<'a> for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        for value in self {
            value.put(out);
        }
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, BadMessage> {
        let mut values = Self::new();
        while !from.is_empty() {
            values.push(T::take(from)?);
        }
        Ok(values)
    }
}

/// Content of a file, a link or an attribute.
impl<'a> Wire<'a> for Cow<'a, [u8]> {
    fn put(&self, out: &mut Vec<u8>) {
        debug_assert!(self.len() <= DATA_MAX, "callers cut data");
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        out.extend_from_slice(self);
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, BadMessage> {
        let length = u32::take(from)? as usize;
        if length > DATA_MAX {
            return Err(BadMessage::Size(length));
        }
        split(from, length).map(Cow::Borrowed)
    }
}

/// What a file is called in its directory: no path, and neither `.` nor `..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name<'a>(Cow<'a, [u8]>);

impl<'a> Name<'a> {
    pub fn new(name: impl Into<Cow<'a, [u8]>>) -> Result<Self, BadMessage> {
        let name = name.into();
        let bad = name.is_empty()
            || name.len() > NAME_MAX
            || name.iter().any(|byte| matches!(byte, 0 | b'/'))
            || matches!(&*name, b"." | b"..");
        if bad { Err(BadMessage::Name) } else { Ok(Self(name)) }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl<'a> Wire<'a> for Name<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::try_from(self.0.len()).unwrap_or(u8::MAX));
        out.extend_from_slice(&self.0);
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, BadMessage> {
        let length = usize::from(u8::take(from)?);
        Self::new(split(from, length)?)
    }
}

/// Names a file wherever it is moved to; only who issued it knows what it says.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    length: u8,
    bytes: [u8; HANDLE_MAX],
}

impl Handle {
    pub fn new(handle: &[u8]) -> Result<Self, BadMessage> {
        let mut bytes = [0; HANDLE_MAX];
        bytes.get_mut(..handle.len()).ok_or(BadMessage::Handle)?.copy_from_slice(handle);
        let length = u8::try_from(handle.len()).map_err(|_| BadMessage::Handle)?;
        Ok(Self { length, bytes })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({:02x?})", self.as_bytes())
    }
}

impl Wire<'_> for Handle {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.length);
        out.extend_from_slice(self.as_bytes());
    }

    fn take(from: &mut &[u8]) -> Result<Self, BadMessage> {
        let length = usize::from(u8::take(from)?);
        Self::new(split(from, length)?)
    }
}

/// A structure, or an enum whose variants have numbers, and their form in bytes: field after field.
macro_rules! wire {
    ($(#[$meta:meta])* struct $name:ident<$life:lifetime> { $($(#[$doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name<$life> { $($(#[$doc])* pub $field: $type,)* }

        impl<$life> Wire<$life> for $name<$life> {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(from: &mut &$life [u8]) -> Result<Self, BadMessage> {
                Ok(Self { $($field: Wire::take(from)?,)* })
            }
        }
    };
    ($(#[$meta:meta])* struct $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl Wire<'_> for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(from: &mut &[u8]) -> Result<Self, BadMessage> {
                Ok(Self { $($field: Wire::take(from)?,)* })
            }
        }
    };
    ($(#[$meta:meta])* enum $name:ident { $($(#[$doc:meta])* $number:literal $variant:ident,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant = $number,)* }

        impl Wire<'_> for $name {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }

            fn take(from: &mut &[u8]) -> Result<Self, BadMessage> {
                match u8::take(from)? {
                    $($number => Ok(Self::$variant),)*
                    other => Err(BadMessage::Kind(other)),
                }
            }
        }
    };
    ($(#[$meta:meta])* enum $name:ident<$life:lifetime> {
        $($(#[$doc:meta])* $number:literal $variant:ident { $($field:ident: $type:ty),* },)*
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum $name<$life> { $($(#[$doc])* $variant { $($field: $type),* },)* }

        impl<$life> Wire<$life> for $name<$life> {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        out.push($number);
                        $($field.put(out);)*
                    })*
                }
            }

            fn take(from: &mut &$life [u8]) -> Result<Self, BadMessage> {
                match u8::take(from)? {
                    $($number => Ok(Self::$variant { $($field: Wire::take(from)?),* }),)*
                    other => Err(BadMessage::Kind(other)),
                }
            }
        }
    };
}

pub(super) use wire;
