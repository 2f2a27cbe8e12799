// msgpack with numpy arrays, as the wire protocol uses it (section 2). Knows nothing about sockets.
//
// Decoding copies nothing: str, bin and arrays are views on the frame, which must outlive them. Every
// length is checked against the bytes that are there before anything is allocated.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace plugrl {

// The peer broke the protocol; reconnecting would not help.
struct WireError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ---- encoding -----------------------------------------------------------------------------------

class Packer {
  public:
    const std::string& bytes() const { return out_; }

    void map(std::size_t size) { head(size, 0x80, 16, 0xde); }
    void list(std::size_t size) { head(size, 0x90, 16, 0xdc); }
    void boolean(bool value) { out_ += static_cast<char>(value ? 0xc3 : 0xc2); }

    void integer(std::uint64_t value) {
        if (value < 128) {
            out_ += static_cast<char>(value);
        } else {
            out_ += static_cast<char>(0xcf);
            big_endian(value, 8);
        }
    }

    void str(std::string_view text) {
        if (text.size() < 32) {
            out_ += static_cast<char>(0xa0 | text.size());
        } else {
            out_ += static_cast<char>(0xdb);
            big_endian(text.size(), 4);
        }
        out_ += text;
    }

    void bin(std::string_view data) {
        if (data.size() > UINT32_MAX) throw std::length_error("an array of more than 4 GiB");
        out_ += static_cast<char>(data.size() < 256 ? 0xc4 : 0xc6);
        big_endian(data.size(), data.size() < 256 ? 1 : 4);
        out_ += data;
    }

    // An array: `data` holds the elements in C order, little-endian.
    void array(std::string_view dtype, const std::vector<std::size_t>& shape, std::string_view data) {
        map(4);
        bin("__ndarray__");
        boolean(true);
        bin("data");
        bin(data);
        bin("dtype");
        str(dtype);
        bin("shape");
        list(shape.size());
        for (std::size_t size : shape) integer(size);
    }

    void array_i8(const std::vector<std::int64_t>& values) {
        std::string data;
        for (std::int64_t value : values) little_endian(data, static_cast<std::uint64_t>(value), 8);
        array("<i8", {values.size()}, data);
    }

    void array_b1(const std::vector<bool>& values) {
        std::string data;
        for (bool value : values) data += static_cast<char>(value);
        array("|b1", {values.size()}, data);
    }

    // Floats of 4 or 8 bytes, from double.
    void array_float(const std::vector<double>& values, const std::vector<std::size_t>& shape, int size) {
        std::string data;
        data.reserve(values.size() * static_cast<std::size_t>(size));
        for (double value : values) {
            std::uint64_t bits = 0;
            if (size == 8) {
                std::memcpy(&bits, &value, 8);
            } else {
                const float narrow = static_cast<float>(value);
                std::uint32_t half = 0;
                std::memcpy(&half, &narrow, 4);
                bits = half;
            }
            little_endian(data, bits, size);
        }
        array(size == 8 ? "<f8" : "<f4", shape, data);
    }

    // A <U array from ASCII strings.
    void array_text(const std::vector<std::string>& texts) {
        std::size_t width = 1;
        for (const std::string& text : texts) width = std::max(width, text.size());
        std::string data;
        for (const std::string& text : texts) {
            for (std::size_t i = 0; i < width; ++i) {
                const char letter = i < text.size() ? text[i] : '\0';
                if (static_cast<unsigned char>(letter) > 127) throw std::invalid_argument("text is not ASCII");
                little_endian(data, static_cast<std::uint64_t>(letter), 4);
            }
        }
        array("<U" + std::to_string(width), {texts.size()}, data);
    }

  private:
    void head(std::size_t size, int fixed, std::size_t limit, int wide) {
        if (size < limit) {
            out_ += static_cast<char>(static_cast<std::size_t>(fixed) | size);
        } else {
            out_ += static_cast<char>(wide + 1);
            big_endian(size, 4);
        }
    }
    void big_endian(std::uint64_t value, int size) {
        for (int i = size - 1; i >= 0; --i) out_ += static_cast<char>(value >> (8 * i) & 0xff);
    }
    static void little_endian(std::string& data, std::uint64_t value, int size) {
        for (int i = 0; i < size; ++i) data += static_cast<char>(value >> (8 * i) & 0xff);
    }

    std::string out_;
};

// ---- decoding -----------------------------------------------------------------------------------

struct Value {
    enum class Kind { nil, boolean, integer, real, str, bin, ext, list, map };
    Kind kind = Kind::nil;
    bool boolean = false;
    bool negative = false;      // integer: whether `integer` holds a negative int64
    std::uint64_t integer = 0;  // two's complement
    double real = 0;
    std::string_view bytes;                   // str, bin, ext: a view on the frame
    std::vector<Value> items;                 // list: the items; map: key, value, key, value ...

    // The value at a str or bin key of a map, or null.
    const Value* find(std::string_view key, Kind key_kind = Kind::str) const {
        if (kind != Kind::map) return nullptr;
        for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
            if (items[i].kind == key_kind && items[i].bytes == key) return &items[i + 1];
        }
        return nullptr;
    }
};

class Unpacker {
  public:
    static Value unpack(std::string_view frame) {
        Unpacker unpacker(frame);
        Value root = unpacker.value(0);
        if (unpacker.at_ != frame.size()) throw WireError("bytes after the end of a msgpack message");
        return root;
    }

  private:
    static constexpr int max_depth = 32;
    static constexpr std::size_t max_values = 1 << 20;

    explicit Unpacker(std::string_view frame) : frame_(frame) {}

    Value value(int depth) {
        if (depth > max_depth) throw WireError("a msgpack tree deeper than 32 levels");
        if (++count_ > max_values) throw WireError("a msgpack tree of more than 2^20 values");
        const unsigned tag = static_cast<unsigned char>(take(1)[0]);
        if (tag < 0x80) return integer(tag, false);
        if (tag < 0x90) return tree(Value::Kind::map, tag & 0x0f, depth);
        if (tag < 0xa0) return tree(Value::Kind::list, tag & 0x0f, depth);
        if (tag < 0xc0) return blob(Value::Kind::str, tag & 0x1f);
        if (tag >= 0xe0) return integer(static_cast<std::uint64_t>(static_cast<std::int64_t>(tag) - 256), true);
        switch (tag) {
            case 0xc0: return Value{};
            case 0xc2:
            case 0xc3: return boolean(tag == 0xc3);
            case 0xc4:
            case 0xc5:
            case 0xc6: return blob(Value::Kind::bin, number(1 << (tag - 0xc4)));
            case 0xc7:
            case 0xc8:
            case 0xc9: return blob(Value::Kind::ext, number(1 << (tag - 0xc7)) + 1);
            case 0xca:
            case 0xcb: return real(tag == 0xca ? 4 : 8);
            case 0xcc:
            case 0xcd:
            case 0xce:
            case 0xcf: return integer(number(1 << (tag - 0xcc)), false);
            case 0xd0:
            case 0xd1:
            case 0xd2:
            case 0xd3: return signed_integer(1 << (tag - 0xd0));
            case 0xd4:
            case 0xd5:
            case 0xd6:
            case 0xd7:
            case 0xd8: return blob(Value::Kind::ext, (1u << (tag - 0xd4)) + 1);
            case 0xd9:
            case 0xda:
            case 0xdb: return blob(Value::Kind::str, number(1 << (tag - 0xd9)));
            case 0xdc:
            case 0xdd: return tree(Value::Kind::list, number(tag == 0xdc ? 2 : 4), depth);
            case 0xde:
            case 0xdf: return tree(Value::Kind::map, number(tag == 0xde ? 2 : 4), depth);
            default: throw WireError("a byte that begins no msgpack value");
        }
    }

    std::string_view take(std::uint64_t size) {
        if (size > frame_.size() - at_) throw WireError("a msgpack message that ends early");
        const std::string_view part = frame_.substr(at_, size);
        at_ += size;
        return part;
    }

    std::uint64_t number(int size) {
        std::uint64_t value = 0;
        for (char byte : take(static_cast<std::uint64_t>(size))) value = value << 8 | static_cast<unsigned char>(byte);
        return value;
    }

    static Value integer(std::uint64_t bits, bool negative) {
        Value v;
        v.kind = Value::Kind::integer;
        v.integer = bits;
        v.negative = negative;
        return v;
    }

    Value signed_integer(int size) {
        std::uint64_t bits = number(size);
        const bool negative = bits >> (8 * size - 1) & 1;
        if (negative && size < 8) bits |= ~std::uint64_t{0} << (8 * size);
        return integer(bits, negative);
    }

    static Value boolean(bool value) {
        Value v;
        v.kind = Value::Kind::boolean;
        v.boolean = value;
        return v;
    }

    Value real(int size) {
        const std::uint64_t bits = number(size);
        Value v;
        v.kind = Value::Kind::real;
        if (size == 8) {
            std::memcpy(&v.real, &bits, 8);
        } else {
            const std::uint32_t half = static_cast<std::uint32_t>(bits);
            float narrow = 0;
            std::memcpy(&narrow, &half, 4);
            v.real = narrow;
        }
        return v;
    }

    Value blob(Value::Kind kind, std::uint64_t size) {
        Value v;
        v.kind = kind;
        v.bytes = take(size);
        return v;
    }

    Value tree(Value::Kind kind, std::uint64_t size, int depth) {
        if (kind == Value::Kind::map) size *= 2;
        if (size > frame_.size() - at_) throw WireError("a msgpack list or map longer than its message");
        Value v;
        v.kind = kind;
        for (std::uint64_t i = 0; i < size; ++i) v.items.push_back(value(depth + 1));
        return v;
    }

    std::string_view frame_;
    std::size_t at_ = 0;
    std::size_t count_ = 0;
};

// ---- arrays -------------------------------------------------------------------------------------

struct Array {
    char kind = 'f';  // b u i f U
    std::size_t item_size = 4;
    bool big_endian = false;
    std::vector<std::size_t> shape;
    std::string_view data;

    std::size_t size() const { return item_size ? data.size() / item_size : 0; }

    // The element at a flat index, of any numeric kind, as a double.
    double number(std::size_t index) const {
        const std::uint64_t value = bits(index);
        if (kind == 'u' || kind == 'b') return static_cast<double>(value);
        if (kind == 'i') return static_cast<double>(sign_extended(value));
        if (item_size == 8) {
            double wide = 0;
            std::memcpy(&wide, &value, 8);
            return wide;
        }
        if (item_size == 4) {
            const std::uint32_t narrow = static_cast<std::uint32_t>(value);
            float real = 0;
            std::memcpy(&real, &narrow, 4);
            return real;
        }
        return half(static_cast<unsigned>(value));
    }

    std::int64_t integer(std::size_t index) const { return sign_extended(bits(index)); }

    // Reads the map with bin keys; throws WireError unless dtype, shape and length are exact.
    static Array from(const Value* value, const char* name) {
        const auto fail = [name](const char* what) { return WireError(std::string(name) + ": " + what); };
        const auto bin = Value::Kind::bin;
        if (!value || !value->find("__ndarray__", bin)) throw fail("not an array");
        const Value* data = value->find("data", bin);
        const Value* dtype = value->find("dtype", bin);
        const Value* shape = value->find("shape", bin);
        if (!data || data->kind != bin || !dtype || dtype->kind != Value::Kind::str || !shape ||
            shape->kind != Value::Kind::list || shape->items.size() > 32) {
            throw fail("an array without data, dtype and shape");
        }
        Array array;
        array.read_dtype(dtype->bytes, fail);
        std::size_t count = 1;
        for (const Value& item : shape->items) {
            if (item.kind != Value::Kind::integer || item.negative || item.integer > UINT32_MAX) {
                throw fail("a negative or overflowing shape");
            }
            if (item.integer && count > SIZE_MAX / 64 / item.integer) throw fail("an overflowing shape");
            count *= item.integer;
            array.shape.push_back(item.integer);
        }
        if (array.item_size && count > SIZE_MAX / array.item_size) throw fail("an overflowing shape");
        if (count * array.item_size != data->bytes.size()) throw fail("data of another length than shape and dtype say");
        array.data = data->bytes;
        return array;
    }

  private:
    template <typename Fail>
    void read_dtype(std::string_view dtype, const Fail& fail) {
        const std::string_view kinds = "buifU";
        if (dtype.size() < 3 || dtype.size() > 8 || kinds.find(dtype[1]) == kinds.npos) throw fail("a dtype that may not travel");
        if (dtype[0] != '<' && dtype[0] != '>' && dtype[0] != '|') throw fail("a dtype without byte order");
        kind = dtype[1];
        big_endian = dtype[0] == '>';
        item_size = 0;
        for (char digit : dtype.substr(2)) {
            if (digit < '0' || digit > '9') throw fail("a dtype without a size");
            item_size = item_size * 10 + static_cast<std::size_t>(digit - '0');
        }
        const bool fits = item_size == 1 || item_size == 2 || item_size == 4 || item_size == 8;
        if (kind == 'U') {
            item_size *= 4;
        } else if (!fits || (kind == 'b' && item_size != 1) || (kind == 'f' && item_size == 1)) {
            throw fail("a dtype of a size that may not travel");
        }
    }

    std::uint64_t bits(std::size_t index) const {
        if (kind == 'U' || index >= size()) throw WireError("an array read out of its bounds");
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < item_size; ++i) {
            const std::size_t byte = big_endian ? i : item_size - 1 - i;
            value = value << 8 | static_cast<unsigned char>(data[index * item_size + byte]);
        }
        return value;
    }

    std::int64_t sign_extended(std::uint64_t value) const {
        const std::size_t width = 8 * item_size;
        if (kind == 'i' && width < 64 && value >> (width - 1) & 1) value |= ~std::uint64_t{0} << width;
        return static_cast<std::int64_t>(value);
    }

    static double half(unsigned bits) {
        const int exponent = static_cast<int>(bits >> 10 & 31);
        const double mantissa = bits & 1023;
        double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        if (exponent == 31) size = mantissa > 0 ? NAN : INFINITY;
        return bits >> 15 ? -size : size;
    }
};

}  // namespace plugrl
