//! Reading Hugging Face configs: typed, with aliases, defaults and bounds.
//!
//! Every getter names the key, what was expected, what was found and the file. Sizes are bounded
//! before anything is allocated from them, so that an absurd config is an error and not an
//! out-of-memory kill.

mod decoder;
mod error;
mod file;
pub mod limits;
mod moe;
mod product;
mod rope;
mod value;

pub use error::ConfigError;
pub use file::read_file;
pub use limits::Bounds;
pub use product::checked_product;
pub use rope::{RopeConfig, RopeScaling, Yarn, yarn_mscale};
pub use value::Config;
