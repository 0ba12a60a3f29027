//! The users that machines have on this host: each machine one of its own, so that neither another machine
//! nor anybody else who is not root may signal or trace it.
//!
//! It follows from the machine's place in the network, which no two machines of a host have at the same
//! time, whatever daemon started them: so there is nothing to remember.

use crate::network::Slot;

/// A range of users that nobody else has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Users {
    first: u32,
}

impl Users {
    /// As many as there are places in the network of a host.
    pub const COUNT: u32 = 1 << 16;
    /// Past all that accounts, dynamic users of services and containers are given by usual tools.
    pub const FIRST: u32 = 0x7470_0000;

    /// None if there are users of the system among them, or numbers that some programs take for negative.
    pub fn starting_at(first: u32) -> Option<Self> {
        let last = first.checked_add(Self::COUNT - 1)?;
        (first >= Self::COUNT && i32::try_from(last).is_ok()).then_some(Self { first })
    }

    /// The user, and the group of the same number, of the machine that has this place.
    pub(crate) fn of(self, slot: &Slot) -> u32 {
        self.first + u32::from(slot.place())
    }
}

impl Default for Users {
    fn default() -> Self {
        Self { first: Self::FIRST }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_neither_users_of_the_system_nor_numbers_that_are_too_large() {
        for first in [0, 1000, 65_535, (1 << 31) - 65_535, 1 << 31, u32::MAX] {
            assert_eq!(Users::starting_at(first), None, "{first}");
        }
        assert_eq!(Users::starting_at(Users::FIRST), Some(Users::default()));
        assert!(Users::starting_at(65_536).is_some());
        assert!(Users::starting_at((1 << 31) - 65_536).is_some());
    }
}
