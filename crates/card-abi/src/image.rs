//! Kernel images in card memory.

/// Largest kernel image (bytes).
pub const MAX_IMAGE_BYTES: u64 = 16 << 20;

/// First 8 bytes of the SHA-256 of an image.
pub fn image_hash(image: &[u8]) -> u64 {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(image);
    u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 has 32 bytes"))
}
