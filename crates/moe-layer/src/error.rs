//! The errors of building a block.

/// Why a block cannot be built. [`cause`](crate::cause) finds this error inside a candle error. It also finds the
/// errors of the parts: [`RouterError`](crate::RouterError) for routings, [`OracleError`](crate::OracleError) for
/// backends, [`QuantError`](crate::QuantError) for quantised weights, [`GeometryError`](crate::GeometryError) for ranks
/// and [`ArgumentError`](crate::ArgumentError) for tensors of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// A `model_type` whose block is not known.
    #[error(
        "model_type `{model_type}` has no block here: fill in a CheckpointBlock by hand; known are {known}"
    )]
    UnknownModelType {
        /// The value of the key.
        model_type: String,
        /// The model types that are known, separated by commas.
        known: String,
    },
    /// An activation that experts do not support.
    #[error("hidden_act `{got}` is not supported; expected {expected}")]
    Activation {
        /// The value of the key.
        got: String,
        /// The values that are supported.
        expected: &'static str,
    },
    /// Shared experts whose total width overflows.
    #[error("{key} = {count} experts of {width} overflow")]
    SharedWidth {
        /// The key that counts shared experts.
        key: &'static str,
        /// The number of shared experts.
        count: usize,
        /// The width of one of them.
        width: usize,
    },
    /// A placement of experts that does not fit the model or the ranks. The text says what was expected and what was
    /// found.
    #[error("{0}")]
    Placement(String),
    /// Parts of a block that do not fit each other. The text names both.
    #[error("{0}")]
    Parts(String),
    /// A feature that this way of loading does not support. The text names a way that does.
    #[error("{0}")]
    Unsupported(String),
    /// A memory size for experts that is too small, or larger than the experts need.
    #[error("{0}")]
    Offload(String),
}

impl From<BlockError> for moe_kernels::candle::Error {
    fn from(error: BlockError) -> Self {
        moe_kernels::into_candle(error)
    }
}

/// Returns a [`BlockError`] of a variant that holds a text, with a formatted message.
macro_rules! refuse {
    ($variant:ident, $($message:tt)*) => {
        return Err($crate::error::BlockError::$variant(format!($($message)*)).into())
    };
}
pub(crate) use refuse;
