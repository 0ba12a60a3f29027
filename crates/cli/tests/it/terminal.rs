//! exec -it on a real terminal.

use rustix::process::Signal;

use crate::seat::{Seat, resize};
use crate::world::{World, until};

fn sit(world: &World, args: &[&str]) -> Seat {
    Seat::new(world.runtime(), world.command(args.iter().copied()))
}

#[test]
fn a_shell_has_a_terminal_of_our_size_and_follows_it() {
    let world = World::with_sandbox();
    let mut seat = sit(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo size=$(stty size)\r");
    seat.sees("size=30 100");
    assert!(!seat.is_cooked(), "keys are not passed on raw");
    resize(&seat.terminal, 41, 123);
    seat.signal(Signal::WINCH);
    until("the new size", || {
        seat.press("echo size=$(stty size)\r");
        std::thread::sleep(std::time::Duration::from_millis(50));
        seat.seen.lock().contains("size=41 123").then_some(())
    });
    seat.press("exit 7\r");
    assert_eq!(seat.end(world.runtime()), 7);
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn ctrl_c_goes_inside() {
    let world = World::with_sandbox();
    let mut seat = sit(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo rea''dy; sleep 100\r");
    seat.sees("ready");
    seat.press("\x03");
    seat.press("echo ali''ve\r");
    seat.sees("alive");
    seat.press("exit\r");
    seat.end(world.runtime());
}

#[test]
fn the_terminal_comes_back_after_an_error() {
    let world = World::with_sandbox();
    let mut seat = sit(&world, &["exec", "-it", "web", "no-such-program"]);
    assert_eq!(seat.end(world.runtime()), 127);
    seat.sees("no-such-program");
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn the_terminal_comes_back_after_a_signal() {
    let world = World::with_sandbox();
    let mut seat = sit(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo rea''dy\r");
    seat.sees("ready");
    seat.signal(Signal::TERM);
    assert_eq!(seat.end(world.runtime()), 143);
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn one_can_leave_a_terminal_and_come_back() {
    let world = World::with_sandbox();
    let mut seat = sit(&world, &["exec", "-itd", "web", "sh"]);
    seat.press("X=kept; echo rea''dy\r");
    seat.sees("ready");
    seat.press("\x10\x11");
    assert_eq!(seat.end(world.runtime()), 0);
    seat.sees("detached; come back with: torpor attach web ");
    assert!(seat.is_cooked());
    let pid = {
        let seen = seat.seen.lock();
        seen.split("torpor attach web ")
            .nth(1)
            .unwrap()
            .split_whitespace()
            .next()
            .unwrap()
            .to_owned()
    };
    let mut seat = sit(&world, &["attach", "web", &pid]);
    seat.press("echo $X-$X\r");
    seat.sees("kept-kept");
    seat.press("exit 9\r");
    assert_eq!(seat.end(world.runtime()), 9);
    assert!(seat.is_cooked());
}
