// Checks of the parts that need no server: published vectors, and frames that lie.
// With an argument, decodes each frame in that file (4 bytes big-endian length, then the frame).
#include <fstream>
#include <iostream>
#include <iterator>

#include "msgpack.hpp"
#include "websocket.hpp"

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (!condition) {
        std::cerr << "failed: " << what << "\n";
        ++failures;
    }
}

bool refused(const std::string& frame) {
    try {
        const plugrl::Value root = plugrl::Unpacker::unpack(frame);
        plugrl::Array::from(root.find("x"), "x");
        return false;
    } catch (const plugrl::WireError&) {
        return true;
    }
}

std::string array_frame(const std::string& dtype, const std::vector<std::size_t>& shape, const std::string& data) {
    plugrl::Packer packer;
    packer.map(1);
    packer.str("x");
    packer.array(dtype, shape, data);
    return packer.bytes();
}

double first_number(const std::string& dtype, const std::string& data) {
    const std::string frame = array_frame(dtype, {1}, data);
    const plugrl::Value root = plugrl::Unpacker::unpack(frame);
    return plugrl::Array::from(root.find("x"), "x").number(0);
}

void check_digests() {
    const auto digest = plugrl::sha1("abc");  // FIPS 180, appendix A.1
    expect(digest[0] == 0xa9 && digest[1] == 0x99 && digest[19] == 0x9d, "sha1 of abc");
    const std::string key = "dGhlIHNhbXBsZSBub25jZQ==258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    const auto accept = plugrl::sha1(key);  // RFC 6455, section 1.3
    expect(plugrl::base64(accept.data(), accept.size()) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", "the accept key");
    const unsigned char letters[] = {'f', 'o', 'o', 'b'};  // RFC 4648, section 10
    expect(plugrl::base64(letters, 0).empty() && plugrl::base64(letters, 1) == "Zg==", "base64 of f");
    expect(plugrl::base64(letters, 2) == "Zm8=" && plugrl::base64(letters, 4) == "Zm9vYg==", "base64 of fo, foob");
}

void check_numbers() {
    expect(first_number("<f4", std::string("\0\0\x80\x3f", 4)) == 1.0, "<f4 1");
    expect(first_number(">f4", std::string("\x3f\x80\0\0", 4)) == 1.0, ">f4 1");
    expect(first_number("<f2", std::string("\x00\xc1", 2)) == -2.5, "<f2 -2.5");
    expect(first_number("<f2", std::string("\x01\x00", 2)) == std::ldexp(1, -24), "<f2 smallest");
    expect(first_number("<i2", std::string("\xfe\xff", 2)) == -2.0, "<i2 -2");
    expect(first_number("|u1", "\xff") == 255.0, "|u1 255");
}

void check_lies() {
    for (const char* dtype : {"|O", "|V8", "<c16", "|S8", "<m8", "<M8", "<f16", "f8", "<f4,<f4", "<f1", "<b8", "<f", ""}) {
        expect(refused(array_frame(dtype, {1}, "01234567")), dtype);
    }
    expect(!refused(array_frame("<f8", {1}, "01234567")), "a sound array");
    expect(refused(array_frame("<f8", {1}, "0123456")) && refused(array_frame("<f8", {1}, "012345678")), "another length");
    const std::size_t huge = std::size_t{1} << 31;
    expect(refused(array_frame("<f8", {huge, huge, huge}, "01234567")), "an overflowing shape");
    expect(refused(std::string(100, '\x91')), "deep nesting");
    expect(refused("\xdf\xff\xff\xff\xff") && refused("\xdd\x7f\xff\xff\xff\xc0"), "a length beyond the message");
    expect(refused("\xc6\xff\xff\xff\xff") && refused("\xc1") && refused("") && refused("\xc0\xc0"), "not one value");
}

// Whatever the frame, decoding it ends in a value or in WireError.
void decode_all(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::size_t decoded = 0, rejected = 0;
    for (std::size_t at = 0; at + 4 <= bytes.size();) {
        std::size_t size = 0;
        for (int i = 0; i < 4; ++i) size = size << 8 | static_cast<unsigned char>(bytes[at++]);
        const std::string frame = bytes.substr(at, size);
        at += size;
        try {
            const plugrl::Value root = plugrl::Unpacker::unpack(frame);
            const plugrl::Value* data = root.find("data");
            const auto action = plugrl::Array::from(data ? data->find("action") : nullptr, "action");
            for (std::size_t i = 0; action.kind != 'U' && i < action.size(); ++i) (void)action.number(i);
            ++decoded;
        } catch (const plugrl::WireError&) {
            ++rejected;
        }
    }
    std::cout << decoded << " decoded, " << rejected << " refused\n";
}

}  // namespace

int main(int argc, char** argv) {
    check_digests();
    check_numbers();
    check_lies();
    if (argc > 1) decode_all(argv[1]);
    return failures ? 1 : 0;
}
