//! Ranks of several processes, on one host or many: a TCP connection between any two.
//!
//! [`rendezvous`] makes the connections, which begin with a [`handshake`] of two processes that know a [`secret`]. A thread per connection reads [`frame`]s into the
//! [`inbox`], so that writing never waits for a rank that is writing itself. A collective is a
//! round as among threads: each rank sends every other one its call and the rows that this one
//! needs, and waits for theirs. Beside the collectives, [`Messages`] of any size travel between two
//! ranks and may be waited for without a limit.
//!
//! A rank that ends says goodbye. A connection that closes without it, breaks, or carries anything
//! but frames fails the [`world`]; the first failure is told to all ranks, whatever group it is in.

mod comm;
mod door;
mod frame;
mod handshake;
mod inbox;
mod link;
mod messages;
mod reach;
mod rendezvous;
mod secret;
mod timeouts;
mod world;

pub use comm::SocketComm;
pub use frame::check_frames;
pub use messages::{Messages, Watch};
pub use rendezvous::Join;
pub use secret::{WORLD_SECRET, WorldSecret};
pub use timeouts::SocketTimeouts;
