//! The errors of this crate. Their texts say how the caller can correct the input.

use std::fmt;

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A size that must be at least one is zero.
    Empty(&'static str),
    /// A buffer or table does not have the size that the other arguments imply.
    Shape {
        /// Which argument.
        what: &'static str,
        /// Entries it must have.
        expected: usize,
        /// Entries it has.
        got: usize,
    },
    /// Sizes whose product no table can have.
    TooLarge {
        /// Which table.
        what: &'static str,
        /// Its sizes.
        sizes: Vec<usize>,
    },
    /// A load is NaN, infinite or negative.
    BadLoad {
        /// Episode of the load.
        step: usize,
        /// Layer of the load.
        layer: usize,
        /// Logical expert of the load.
        expert: usize,
        /// The load itself.
        value: f64,
    },
    /// The loads of a layer together are more than an f32 holds.
    TooMuchLoad {
        /// The layer.
        layer: usize,
        /// Their sum.
        total: f64,
    },
    /// One quantity must be a multiple of another.
    NotDivisible {
        /// What is divided.
        what: &'static str,
        /// Its size.
        total: usize,
        /// What divides it.
        by: &'static str,
        /// Its size.
        parts: usize,
    },
    /// Fewer physical slots than logical experts: some expert would have no slot.
    TooFewSlots {
        /// Physical slots.
        slots: usize,
        /// Logical experts.
        experts: usize,
    },
    /// More slots on a device than there are experts: two of them would hold the same expert.
    DeviceTooWide {
        /// Slots of one device.
        slots_per_device: usize,
        /// Logical experts.
        experts: usize,
    },
    /// An id outside its range.
    OutOfRange {
        /// What the id names.
        what: &'static str,
        /// The id.
        got: usize,
        /// One past the largest valid id.
        limit: usize,
    },
    /// A logical expert without any copy.
    MissingExpert {
        /// Layer of the gap.
        layer: usize,
        /// The expert without a copy.
        expert: usize,
    },
    /// Two copies of one expert on one device.
    DuplicateExpert {
        /// Layer of the pair.
        layer: usize,
        /// Device that holds both.
        device: usize,
        /// The expert held twice.
        expert: usize,
    },
    /// A setting outside its range.
    Setting {
        /// Which setting.
        what: &'static str,
        /// What it must satisfy.
        must: &'static str,
    },
    /// A migration plan that would break the model, and where.
    UnsafePlan {
        /// Index of the transfer that breaks it (the number of transfers for the end state).
        transfer: usize,
        /// What would break.
        reason: &'static str,
    },
    /// Text that is not in the expected format.
    Format {
        /// Line, counted from 1; 0 if the text is one document.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty(what) => write!(f, "{what} must be at least 1"),
            Self::Shape { what, expected, got } => {
                write!(f, "{what}: expected {expected} entries, got {got}")
            }
            Self::TooLarge { what, sizes } => write!(f, "{what} of sizes {sizes:?} do not fit into memory"),
            Self::BadLoad { step, layer, expert, value } => write!(
                f,
                "load of step {step}, layer {layer}, expert {expert} is {value}; loads must be finite and >= 0"
            ),
            Self::TooMuchLoad { layer, total } => write!(
                f,
                "the loads of layer {layer} sum to {total:e}; at most {:e} can be planned, so scale them down",
                f32::MAX
            ),
            Self::NotDivisible { what, total, by, parts } => {
                write!(f, "{total} {what} cannot be divided evenly over {parts} {by}")
            }
            Self::TooFewSlots { slots, experts } => {
                write!(f, "{slots} physical slots cannot hold {experts} logical experts")
            }
            Self::DeviceTooWide { slots_per_device, experts } => write!(
                f,
                "{slots_per_device} slots per device but only {experts} experts: \
                 a device would hold an expert twice (allow duplicates to accept that)"
            ),
            Self::OutOfRange { what, got, limit } => {
                write!(f, "{what} {got} is out of range 0..{limit}")
            }
            Self::MissingExpert { layer, expert } => {
                write!(f, "layer {layer}: expert {expert} has no copy")
            }
            Self::DuplicateExpert { layer, device, expert } => {
                write!(f, "layer {layer}: device {device} holds expert {expert} twice")
            }
            Self::Setting { what, must } => write!(f, "{what} must be {must}"),
            Self::UnsafePlan { transfer, reason } => {
                write!(f, "migration plan breaks at transfer {transfer}: {reason}")
            }
            Self::Format { line: 0, reason } => write!(f, "{reason}"),
            Self::Format { line, reason } => write!(f, "line {line}: {reason}"),
        }
    }
}

impl std::error::Error for Error {}

/// Fails unless a buffer or table has as many entries as the other arguments imply.
pub(crate) fn expect_len(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Shape { what, expected, got }) }
}

/// Returns the number of entries of a table of these sizes. Fails if no table can have that many.
pub(crate) fn entries(what: &'static str, sizes: &[usize]) -> Result<usize> {
    let product = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    // An entry has at most 8 bytes, and no allocation has more than isize::MAX.
    let entries = product.filter(|entries| *entries <= isize::MAX as usize / 8);
    entries.ok_or_else(|| Error::TooLarge { what, sizes: sizes.to_vec() })
}

/// Fails unless an id is below its limit.
pub(crate) fn expect_below(what: &'static str, got: usize, limit: usize) -> Result<()> {
    if got < limit { Ok(()) } else { Err(Error::OutOfRange { what, got, limit }) }
}

/// Fails if a setting is not a finite number of at least 0.
pub(crate) fn expect_share(what: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::Setting { what, must: "a finite number of at least 0" })
}

/// Fails if a size is zero.
pub(crate) fn expect_some(sizes: &[(&'static str, usize)]) -> Result<()> {
    sizes.iter().find(|(_, size)| *size == 0).map_or(Ok(()), |(what, _)| Err(Error::Empty(what)))
}

/// Fails unless a quantity divides evenly over another.
pub(crate) fn expect_multiple(
    (what, total): (&'static str, usize),
    (by, parts): (&'static str, usize),
) -> Result<()> {
    if total.is_multiple_of(parts) { Ok(()) } else { Err(Error::NotDivisible { what, total, by, parts }) }
}
